"""How a tensor's elements are laid over the lines that kernels take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import rows_of
from weft.operators.dropout.philox import GROUP
from weft.operators.quantization.formats import BLOCK, Scheme


class Lines(NamedTuple):
    """Lines of ``length`` elements, so many of each of ``outer`` rows of n (the last may be shorter); ``whole``: rows."""

    outer: int
    lines: int
    length: int
    n: int
    whole: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.lines, self.length, self.n

    @property
    def ragged(self) -> bool:
        return not self.whole and self.lines * self.length != self.n

    def steps(self, row: int, column: int = 1, per: int = 1) -> tuple[int, int]:
        """From one outer index to the next and from one line to the next, in a tensor of these strides that holds ``per``
        elements in one."""
        return (0, row) if self.whole else (row, self.length // per * column)

    @property
    def scale_steps(self) -> tuple[int, int]:
        """The same in scales, one for each line."""
        return (0, 1) if self.whole else (self.lines, 1)


def lines_of(m: int, n: int, scheme: Scheme, flat: bool) -> Lines:
    """Of a tensor [m, n]; ``flat`` says that its rows follow each other without a gap, in all that is read and written."""
    if scheme.granularity == "tensor" and flat:
        return Lines(1, 1, m * n, m * n, whole=True)
    length = {"group": min(scheme.group_size, n), "block": min(BLOCK, n)}.get(scheme.granularity, n)
    if length == n and scheme.granularity != "block":
        return Lines(1, m, n, n, whole=True)
    if scheme.granularity == "group" and flat and n % length == 0:
        return Lines(1, m * n // length, length, m * n)
    return Lines(m, -(-n // length), length, n)


def flat(x: Tensor, n: int, scheme: Scheme, random: bool) -> bool:
    """Whether rows of x, of their values and of their random numbers follow each other without a gap."""
    return x.is_contiguous() and (n % GROUP == 0 or not (random or scheme.of.per_byte > 1))


def rows(x: Tensor) -> tuple[int, int, int, int]:
    """Raises Declined where x is no rows of one stride."""
    found = rows_of(x)
    if found is None:
        raise Declined("the leading dimensions do not collapse into rows of one stride, so a copy would be needed")
    return found


def matrices(x: Tensor) -> tuple[int, int]:
    """A tensor of two dimensions or more as a batch of matrices: how many, and from one to the next."""
    count, _, stride, _ = rows(torch.select(x, -2, 0) if x.shape[-2] else x)
    return count, stride
