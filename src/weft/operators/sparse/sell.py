"""``SELL``: a sparse matrix in slices of C rows, column by column, its rows sorted by length within windows of σ rows.

SELL-C-σ: Kreutzer, Hager, Wellein, Fehske & Bishop, "A unified sparse matrix data format for efficient general sparse
matrix-vector multiplication on modern processors with wide SIMD units", SIAM J. Sci. Comput. 36(5), 2014 (arXiv 1307.6209).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from weft.operators.call import traced
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.pattern import Kept, rows_of_elements

SLICE, WINDOW = 32, 1024  # C: a warp's lanes; σ: so many rows' results lie within 4 KB in fp32


@dataclass(frozen=True, eq=False, repr=False)
class SELL:
    """A sparse matrix [M, N] as slices of C rows, each padded to its longest row. Made by :meth:`from_csr`.

    Element j of the row at place p lies at slice_offsets[p // C] + j·C + p % C. What pads is never read.
    """

    slice_offsets: Tensor  # [⌈M / C⌉ + 1]
    rows: Tensor  # [M], int32 or int64: the row at each place
    lengths: Tensor  # [M], int32 or int64: how many elements it has
    columns: Tensor  # [slice_offsets[-1]], as values
    values: Tensor
    shape: tuple[int, int]  # (M, N)
    slice_rows: int  # C
    _kept: ClassVar[Kept | None] = None  # each matrix sets its own

    def __repr__(self) -> str:
        (m, n), dtype = self.shape, str(self.values.dtype).removeprefix("torch.")
        return f"SELL({m} × {n}, slices of {self.slice_rows}, {len(self.values)} with padding, {dtype}, {self.values.device})"

    @classmethod
    def from_csr(cls, matrix: CSR, slice_rows: int = SLICE, window: int = WINDOW) -> "SELL":
        """From a CSR, in slices of C = ``slice_rows``; waits for the device once. ``window``: σ, rows that are sorted together,
        1 for none, M for all (least padding)."""
        if not isinstance(matrix, CSR):
            raise TypeError(f"SELL.from_csr: argument 'matrix' is a {type(matrix).__name__}; expected a CSR")
        for name, value in (("slice_rows", slice_rows), ("window", window)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"SELL.from_csr: argument '{name}' is {value!r}; expected a whole number, 1 or more")
        (m, _), device = matrix.shape, matrix.values.device
        offsets = matrix.row_offsets.long()
        lengths = offsets.diff()
        place = torch.arange(m, device=device)
        longest_first = torch.sort(-lengths, stable=True).indices  # two stable sorts: by length, then by window
        rows = longest_first[torch.sort(longest_first // window, stable=True).indices]
        lengths = lengths[rows]
        slices = torch.nn.functional.pad(lengths, (0, -m % slice_rows)).view(-1, slice_rows)
        widths = slices.amax(1) * slice_rows if m else slices.new_zeros(0)
        starts = torch.nn.functional.pad(widths.cumsum(0), (1, 0))
        size = int(starts[-1]) if not starts.is_meta else matrix.stored
        place_of = torch.empty_like(place)
        place_of[rows] = place
        row = rows_of_elements(matrix.row_offsets, matrix.stored)
        at, j = place_of[row], torch.arange(matrix.stored, device=device) - offsets[row]
        to = starts[at // slice_rows] + j * slice_rows + at % slice_rows
        columns = matrix.columns.new_zeros(size).index_copy_(0, to, matrix.columns)
        values = matrix.values.new_zeros(size).index_copy_(0, to, matrix.values.detach())
        index = torch.int64 if size >= 2**31 else matrix.row_offsets.dtype
        rows, lengths = rows.to(matrix.row_offsets.dtype), lengths.to(matrix.row_offsets.dtype)
        return cls(starts.to(index), rows, lengths, columns, values, matrix.shape, slice_rows)

    def to_csr(self) -> CSR:
        """The matrix as CSR, rows in their own order, elements of a row in theirs."""
        place = torch.repeat_interleave(torch.arange(len(self.lengths), device=self.rows.device), self.lengths.long())
        ends = self.lengths.long().cumsum(0)
        j = torch.arange(len(place), device=place.device) - (ends - self.lengths)[place]
        at = self.slice_offsets.long()[place // self.slice_rows] + j * self.slice_rows + place % self.slice_rows
        row, order = torch.sort(self.rows.long()[place], stable=True)
        offsets = torch.searchsorted(row, torch.arange(self.shape[0] + 1, device=row.device))
        at = at[order]
        return CSR(offsets.to(self.rows.dtype), self.columns[at], self.values[at], self.shape, check=False)

    def as_csr(self) -> CSR:
        """The same, made once for the matrix as it is (while a compiler traces, at every call)."""
        if traced(self.values):
            return self.to_csr()
        tensors = (self.slice_offsets, self.rows, self.lengths, self.columns, self.values)
        if self._kept is None or not self._kept.holds_for(*tensors):
            object.__setattr__(self, "_kept", Kept(*tensors))
        assert self._kept is not None  # just set
        return self._kept.get("csr", self.to_csr)
