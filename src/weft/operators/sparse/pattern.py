"""Where a sparse matrix's stored elements lie: what must hold of row offsets and columns, what is computed once from them."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from weft.operators.checks import check_device, check_shape, check_tensor

INDICES = (torch.int32, torch.int64)
VALUES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Matrix = TypeVar("Matrix", bound="Compressed")
Made = TypeVar("Made")


def whole_shape(kind: str, shape: Any) -> tuple[int, int]:
    """The shape as two whole numbers. Raises TypeError or ValueError."""
    pair = isinstance(shape, Sequence) and len(shape) == 2
    if not pair or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"{kind}: argument 'shape' is {shape!r}; expected two whole numbers (rows, columns)")
    rows, columns = shape
    if rows < 0 or columns < 0:
        raise ValueError(f"{kind}: argument 'shape' is {tuple(shape)}; expected no negative number")
    return rows, columns


def check_array(
    kind: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], ndim: int, like: Tensor, first: str = "row_offsets"
) -> None:  # fmt: skip
    """Raises unless ``value`` is a contiguous tensor of one of the dtypes and of ``ndim`` dimensions, on ``like``'s device."""
    check_tensor(kind, name, value, dtypes)
    check_shape(kind, name, value, value.ndim == ndim, f"{ndim} dimension(s)")
    if not value.is_contiguous():
        raise ValueError(f"{kind}: argument '{name}' has strides {value.stride()}; expected a contiguous tensor")
    check_device(kind, name, value, first, like)


def check_pattern(
    kind: str, row_offsets: Tensor, columns: Tensor, stored: int, shape: tuple[int, int], row: str = "row"
) -> None:
    """Raises ValueError unless row_offsets [M + 1] rise from 0 to ``stored`` and columns [stored] lie in 0 … N - 1; the error
    names the row. Waits for the device once (a second time to say what is wrong)."""
    n = shape[1]
    falling = row_offsets[1:] < row_offsets[:-1]
    outside = (columns < 0) | (columns >= n)
    found = (falling.any(), outside.any(), row_offsets[0], row_offsets[-1])
    falls, strays, first, last = torch.stack([t.long() for t in found]).tolist()
    if first != 0:
        raise ValueError(f"{kind}: argument 'row_offsets' begins with {first}; expected 0")
    if falls:
        at = int(falling.nonzero()[0])
        before, after = row_offsets[at : at + 2].tolist()
        raise ValueError(
            f"{kind}: argument 'row_offsets' falls from {before} to {after} at {row} {at}; expected offsets that never fall"
        )
    if last != stored:
        raise ValueError(
            f"{kind}: argument 'row_offsets' ends with {last}; expected {stored}, as many as there are columns and values"
        )
    if strays:
        at = int(outside.nonzero()[0])
        where = int(torch.searchsorted(row_offsets, at, right=True)) - 1
        raise ValueError(
            f"{kind}: argument 'columns' has {int(columns[at])} at position {at}, in {row} {where} "
            f"({int(outside.sum())} such in all); expected 0 … {n - 1}"
        )


def rows_of_elements(row_offsets: Tensor, stored: int) -> Tensor:
    """The row of each stored element, [Z] int64, without waiting for the device."""
    counts = row_offsets.diff().long()
    rows = torch.arange(len(counts), device=row_offsets.device)
    return torch.repeat_interleave(rows, counts, output_size=stored)


def transposed(row_offsets: Tensor, columns: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pattern of the transposed matrix: its row offsets [N + 1], its columns [Z], and which element of the matrix each of
    its elements is [Z]. Within a row they keep their order, so sums over them are the same every time."""
    rows = rows_of_elements(row_offsets, len(columns))
    ordered, order = torch.sort(columns, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(n + 1, device=columns.device, dtype=columns.dtype))
    return starts.to(row_offsets.dtype), rows[order].to(columns.dtype), order


@dataclass(frozen=True, eq=False, repr=False)
class Compressed:
    """What CSR and BSR share: the rows of a matrix's elements, or the block rows of its blocks."""

    row_offsets: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]
    check: InitVar[bool] = True

    IN_TORCH: ClassVar[Callable[..., Tensor]]  # makes PyTorch's tensor of this layout
    ROW: ClassVar[str]
    COUNTS: ClassVar[str]  # how an error gives the lengths of values and columns
    VALUE_DIMENSIONS: ClassVar[int]

    def __post_init__(self, check: bool) -> None:
        kind, offsets = type(self).__name__, self.row_offsets
        object.__setattr__(self, "shape", whole_shape(kind, self.shape))
        dimensions = {"row_offsets": 1, "columns": 1, "values": self.VALUE_DIMENSIONS}
        for name, ndim in dimensions.items():
            like = offsets if isinstance(offsets, Tensor) else torch.empty(0)
            check_array(kind, name, getattr(self, name), VALUES if name == "values" else INDICES, ndim, like)
        m, n = self._rows_and_columns()
        if len(offsets) != m + 1:
            raise ValueError(
                f"{kind}: argument 'row_offsets' has {len(offsets)} elements; expected {m + 1}, one more than {self.ROW}s"
            )
        if len(self.columns) != len(self.values):
            counts = self.COUNTS.format(len(self.values), len(self.columns))
            raise ValueError(f"{kind}: argument 'values' has {counts}; expected the same number")
        if check and not self.values.is_meta:
            check_pattern(kind, offsets, self.columns, len(self.columns), (m, n), self.ROW)

    def _rows_and_columns(self) -> tuple[int, int]:
        """How many rows and columns the indices count; checks what the shape asks of the values."""
        return self.shape

    def with_values(self: Matrix, values: Tensor) -> Matrix:
        """The same pattern with other values, of the same number."""
        made = copy.copy(self)
        object.__setattr__(made, "values", values)
        return made

    def to_torch(self) -> Tensor:
        """A tensor of PyTorch's sparse layout that shares this matrix's memory (index dtypes that differ become int64)."""
        offsets, columns = self.row_offsets, self.columns
        if offsets.dtype != columns.dtype:
            offsets, columns = offsets.long(), columns.long()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "in beta state", once a process
            return type(self).IN_TORCH(offsets, columns, self.values, self.shape, check_invariants=False)


class Kept:
    """What was computed from a pattern, for as long as its tensors are the same and unchanged."""

    def __init__(self, *tensors: Tensor):
        self.tensors, self.versions = tensors, [_version(t) for t in tensors]
        self.found: dict[Any, Any] = {}

    def holds_for(self, *tensors: Tensor) -> bool:
        pairs = zip(self.tensors, tensors, strict=True)
        return all(a is b for a, b in pairs) and self.versions == [_version(t) for t in tensors]

    def get(self, key: Any, make: Callable[[], Made]) -> Made:
        if key not in self.found:
            self.found[key] = make()
        found: Made = self.found[key]
        return found


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
