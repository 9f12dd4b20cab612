"""``Sparse24``: a matrix with two of every four consecutive elements of a row stored (2:4 semi-structured)."""

import dataclasses
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from weft.operators.checks import check_shape
from weft.operators.sparse.pattern import VALUES, check_array, whole_shape

PLACES = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # the only ones of a group that the PTX ISA allows: rising


def kept_of_four(a: Tensor) -> Tensor:
    """Of [M, K] in groups of four: the places of the two largest magnitudes, rising, [M, K / 4, 2]. Of equal ones the
    earlier; NaN counts as infinite."""
    size = a.detach().float().abs().reshape(a.shape[0], a.shape[1] // 4, 4).nan_to_num(torch.inf, torch.inf)
    return size.sort(dim=-1, descending=True, stable=True).indices[..., :2].sort(-1).values


@dataclass(frozen=True, eq=False, repr=False)
class Sparse24:
    """A matrix [M, K] of which two of every four consecutive elements of a row are stored. Made by :meth:`from_dense`.

    The metadata is what ``mma.sp`` wants of 16-bit elements (PTX ISA, "Sparse matrix storage" and "Matrix fragments for
    mma.sp.m16n8k32 with .f16 and .bf16 types"): 4 bits for each group of four, the places of its two elements, rising from the
    low bits up; groups from the lowest bits up. One int16 holds 16 columns of a row, as CUTLASS packs them: to feed the
    instruction, whole int16 have to be moved, and none repacked.
    """

    values: Tensor  # [M, K / 2]; float32, float16, bfloat16 or float64
    metadata: Tensor  # [M, K / 16], int16
    shape: tuple[int, int]  # (M, K), K a multiple of 16
    check: InitVar[bool] = True  # whether to look at the metadata, which waits for the device once

    def __post_init__(self, check: bool) -> None:
        m, k = whole_shape("Sparse24", self.shape)
        if k % 16:
            raise ValueError(f"Sparse24: argument 'shape' is {(m, k)}; expected a multiple of 16 columns")
        object.__setattr__(self, "shape", (m, k))
        like = self.values if isinstance(self.values, Tensor) else torch.empty(0)
        for name, dtypes, columns in (("values", VALUES, k // 2), ("metadata", (torch.int16,), k // 16)):
            value = getattr(self, name)
            check_array("Sparse24", name, value, dtypes, 2, like, "values")
            expected = f"{(m, columns)} for a matrix {(m, k)}"
            check_shape("Sparse24", name, value, value.shape == (m, columns), expected)
        if check and not self.values.is_meta:
            first, second = self.places().unbind(-1)
            wrong = first >= second
            if bool(wrong.any()):
                row, group = wrong.nonzero()[0].tolist()
                raise ValueError(
                    f"Sparse24: argument 'metadata' has the places {int(first[row, group])} and {int(second[row, group])} in "
                    f"group {group} of row {row} ({int(wrong.sum())} such in all); expected rising ones"
                )

    def __repr__(self) -> str:
        (m, k), dtype = self.shape, str(self.values.dtype).removeprefix("torch.")
        return f"Sparse24({m} × {k}, {dtype}, {self.values.device})"

    def with_values(self, values: Tensor) -> "Sparse24":
        """The same places with other values [M, K / 2]."""
        return dataclasses.replace(self, values=values, check=False)

    @classmethod
    def from_dense(cls, a: Tensor) -> "Sparse24":
        """From a matrix [M, K] with at most two non-zeros in every group of four (``prune_2_4`` makes one of any). Raises
        TypeError for no floating tensor, ValueError for no such matrix (the error names the row of a group with more)."""
        if not isinstance(a, Tensor) or a.dtype not in VALUES or a.layout != torch.strided:
            what = f"{a.dtype}, {a.layout}" if isinstance(a, Tensor) else type(a).__name__
            raise TypeError(f"Sparse24.from_dense: argument 'a' is {what}; expected a dense floating torch.Tensor")
        fits = a.ndim == 2 and a.shape[1] % 16 == 0
        check_shape("Sparse24.from_dense", "a", a, fits, "a matrix with a multiple of 16 columns")
        groups = a.reshape(a.shape[0], a.shape[1] // 4, 4)
        many = (groups != 0).sum(-1) > 2
        if bool(many.any()):
            row, group = many.nonzero()[0].tolist()
            raise ValueError(
                f"Sparse24.from_dense: argument 'a' has more than two non-zeros in columns {4 * group} … {4 * group + 3} of "
                f"row {row} ({int(many.sum())} such groups in all); expected at most two (prune_2_4 keeps the two largest)"
            )
        places = kept_of_four(a.reshape(groups.shape[0], a.shape[1]))
        values = groups.gather(-1, places).reshape(a.shape[0], a.shape[1] // 2)
        return cls(values, metadata_of(places), (a.shape[0], a.shape[1]), check=False)

    def places(self) -> Tensor:
        """[M, K / 4, 2]: where in its group each stored element lies."""
        shifts = torch.arange(0, 16, 2, device=self.metadata.device)
        bits = (self.metadata.long()[..., None] >> shifts) & 3
        return bits.view(self.shape[0], self.shape[1] // 4, 2)

    def to_dense(self) -> Tensor:
        """[M, K], zeros where nothing is stored."""
        m, k = self.shape
        groups = self.values.new_zeros((m, k // 4, 4))
        return groups.scatter(-1, self.places(), self.values.view(m, k // 4, 2)).view(m, k)


def metadata_of(places: Tensor) -> Tensor:
    """[M, K / 4, 2] places in groups → [M, K / 16] int16."""
    m, groups, _ = places.shape
    shifts = torch.arange(0, 16, 2, device=places.device)
    words = (places.view(m, groups // 4, 8) << shifts).sum(-1)
    return torch.where(words < 2**15, words, words - 2**16).to(torch.int16)
