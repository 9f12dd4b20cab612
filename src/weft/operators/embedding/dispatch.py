"""Which kernel gathers rows of a table, and which sums the table's gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.operators.checks import check_device, check_shape, check_tensor
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.embedding import kernels
from weft.operators.layout import rows_of

ONE_STRIDE = "ids that do not collapse into one stride, so a copy would be needed"


def flat(ids: Tensor) -> Tensor | None:
    """The ids as a vector of one stride, where that needs no copy."""
    rows = rows_of(ids[..., None])
    return None if rows is None else ids.as_strided((rows[0],), (rows[2],))


@dataclass
class EmbeddingCall(Call):
    """Rows of the table [V, D] that N ids of any shape name."""

    ids: Tensor
    table: Tensor
    padding_idx: int | None

    def __post_init__(self) -> None:
        ids, table, padding_idx = self.ids, self.table, self.padding_idx
        check_tensor("embedding", "ids", ids, (torch.int64, torch.int32))
        check_tensor("embedding", "table", table)
        check_device("embedding", "ids", ids, "table", table)
        check_shape("embedding", "table", table, table.ndim == 2, "[V, D]")
        v = table.shape[0]
        if padding_idx is not None and (isinstance(padding_idx, bool) or not isinstance(padding_idx, int)):
            raise TypeError(f"embedding: argument 'padding_idx' is {padding_idx!r}; expected an int or None")
        if padding_idx is not None and not -v <= padding_idx < v:
            raise ValueError(f"embedding: argument 'padding_idx' is {padding_idx}; expected {-v} … {v - 1}")
        self.x = table
        self.n, (self.v, self.d), self.vector = ids.numel(), table.shape, flat(ids)

    @property
    def empty(self) -> bool:
        return not self.n * self.table.numel()

    @property
    def sliced(self) -> bool:
        """Whether rows are named twice in the mean and the table is larger than what stays in L2."""
        large = self.v * self.d * self.table.element_size() > kernels.SLICE_BYTES
        return self.n >= 2 * self.v and large and self.vectors

    @property
    def vectors(self) -> bool:
        """Whether rows of table and result begin on 16 bytes; others are slower by slices (51 us against 42)."""
        row, column = self.table.stride()
        return column == 1 and not any(n * self.table.element_size() % 16 for n in (row, self.d))


@dataclass
class EmbeddingGradient(Call):
    """x, the table's gradient [V, D], from dy [N, D] and ids [N]; ``padding`` is a row without a gradient, -1 for none."""

    ids: Tensor
    dy: Tensor
    x: Tensor
    padding: int


def copy_needed(c: EmbeddingCall) -> str:
    return ONE_STRIDE if c.vector is None else ""


FORWARD = Dispatch(
    EmbeddingCall, ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: c.vector is None, ONE_STRIDE),
    Route("triton", lambda c: c.sliced, "programs that run together read a slice of the table, which stays in L2",
          kernels.launch_slices, copy_needed),
    Route("triton", lambda c: True, "a program gathers whole rows", kernels.launch_rows, copy_needed),
)  # fmt: skip

BACKWARD = Dispatch(
    EmbeddingGradient,
    Route("triton", lambda c: True, "ids are sorted, and each row's run is summed in a fixed order", kernels.Backward),
)
