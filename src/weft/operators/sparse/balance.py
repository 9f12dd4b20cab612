"""How a matrix's work is shared out: statistics of its rows, and the merge path's partition into equal parts."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from weft.operators.configs import bucket
from weft.operators.sparse.csr import CSR

WIDEST = 128  # lanes that one row of row-split may have
TOGETHER = 32  # rows whose lanes wait for each other: what `statistics` counts as one tile


def row_width(m: int, stored: int) -> int:
    """Lanes for each row: the power of two from the mean length up, so that a mean row is one step."""
    return min(bucket(-(-stored // max(m, 1)), 2), WIDEST)


@dataclass(frozen=True)
class RowStatistics:
    """Of a matrix's rows."""

    mean: float  # elements in a row
    longest: int
    empty: int  # rows without any
    padding: (
        float  # lanes that row-split occupies, over those that hold an element: rows of a tile wait for its longest
    )

    def __str__(self) -> str:
        return f"mean row {self.mean:.1f}, longest {self.longest}, {self.empty} empty, padding {self.padding:.2f}"


def statistics(matrix: CSR) -> RowStatistics:
    """Statistics of the rows, computed once; the first call waits for the device."""

    def make() -> RowStatistics:
        (m, _), z = matrix.shape, matrix.stored
        if not m or not z:
            return RowStatistics(0.0, 0, m, 1.0)
        lengths = matrix.row_offsets.diff()
        width = row_width(m, z)
        tiles = torch.nn.functional.pad(lengths, (0, -m % TOGETHER)).view(-1, TOGETHER)
        steps = (tiles.amax(1).long() + width - 1) // width
        found = torch.stack([lengths.amax().long(), (lengths == 0).sum(), steps.sum() * width * TOGETHER])
        longest, empty, lanes = found.tolist()
        return RowStatistics(z / m, longest, empty, lanes / z)

    return matrix.kept("statistics", make)


@dataclass(frozen=True)
class Partition:
    """Equal parts of the merge path (Merrill & Garland, SC16): the ends of M rows merged with Z elements in the order in which
    a sequential product meets them, cut every ``items``."""

    items: int
    rows: Tensor  # [P + 1], row_offsets' dtype: the row in which part p begins; its first element is p·items - rows[p]
    # [P], int32: of how many parts' open sums the row that is open at the end of part p is made, where p is the first of
    # them; else 0
    runs: Tensor
    heads: Tensor  # [⌈(Z + 1) / 32⌉], int32: bit z % 32 of word z // 32 says that element z begins a row


def partition(matrix: CSR, items: int) -> Partition:
    """The partition into parts of ``items`` rows and elements, computed once; nothing waits for the device."""

    def make() -> Partition:
        (m, _), z, offsets = matrix.shape, matrix.stored, matrix.row_offsets
        parts = triton.cdiv(m + z, items)
        cuts = (torch.arange(parts + 1, device=offsets.device) * items).clamp_(max=m + z)
        ends = offsets[1:] + torch.arange(1, m + 1, device=offsets.device)  # the place of each row's end on the path
        rows = torch.searchsorted(ends, cuts, right=True)  # rows that end before each cut
        return Partition(items, rows.to(offsets.dtype), _runs(offsets, rows, cuts), heads(offsets, z))

    return matrix.kept(("partition", items), make)


def _runs(offsets: Tensor, rows: Tensor, cuts: Tensor) -> Tensor:
    """See :class:`Partition`. A row is split by a cut if it began before it."""
    row, at = rows[1:], (cuts - rows)[1:]
    split = at > offsets[row]  # offsets[M] = Z, so the end of the path splits nothing
    first = split.clone()
    first[1:] &= ~(split[:-1] & (row[1:] == row[:-1]))
    last = torch.searchsorted(row, row, right=True)
    return torch.where(first, last - torch.arange(len(row), device=row.device), 0).to(torch.int32)


def heads(offsets: Tensor, stored: int) -> Tensor:
    """One bit for each element: whether it begins a row. In pieces, since a bit takes 4 bytes while it is packed."""
    begins = torch.zeros(triton.cdiv(stored + 1, 32) * 32, dtype=torch.bool, device=offsets.device)
    begins[offsets.long()] = True  # an empty row marks where the next one begins
    place = torch.arange(32, device=offsets.device, dtype=torch.int32)
    pieces = begins.view(-1, 32).split(2**20)
    return torch.cat([(piece.int() << place).sum(1, dtype=torch.int32) for piece in pieces])
