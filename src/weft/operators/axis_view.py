"""A tensor of any shape and strides as [M, N, K], of which the axis N is reduced or scanned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.operators.layout import dense


@dataclass(frozen=True)
class AxisView:
    """A tensor as [M, N, K] and the stride of each dimension: M is what lies before the axis, K what lies after it."""

    M: int
    N: int
    K: int
    m: int
    n: int
    k: int

    @property
    def elements(self) -> int:
        return self.M * self.N * self.K

    @property
    def dense_axis(self) -> int:
        """1 where N has stride 1, 2 where K has, 0 where neither."""
        return 1 if self.n == 1 else 2 if self.k == 1 else 0

    @property
    def by_rows(self) -> "AxisView":
        """The same with K = 1 where N is dense and M and K have one stride; a result for each [M, K] stays where it is."""
        if self.K > 1 and self.n == 1 and self.N > 1 and self.k and (self.M == 1 or self.m == self.K * self.k):
            return AxisView(self.M * self.K, self.N, 1, self.k, 1, 0)
        return self

    def unit(self, *others: "AxisView") -> int:
        """The largest power of two up to 16 that divides the strides and extents that ``kernels.known_strides`` names."""
        axis = self.dense_axis
        if not axis or any(v.dense_axis != axis for v in others):
            return 1
        every = [16, self.N if axis == 1 else self.K]
        for v in (self, *others):
            every += [v.m, v.k if axis == 1 else v.n]
        return math.gcd(*every)


def axis_views(x: Tensor, dim: int | None, *others: Tensor, in_order: bool = False) -> list[AxisView] | None:
    """The view of x along ``dim``, or of all elements, and the views of others of its shape that match it element by element;
    None where the dimensions before or after it have no common stride, so that a copy would be needed. All elements of a
    tensor that is not dense are rows, [M, N, 1].

    Args:
        in_order: keep the order of elements (a sum may take them in memory order, an index may not).
    """
    every = (x, *others)
    flat = dim is None and (x.is_contiguous() or (not in_order and dense(x)))
    if flat and all(t.stride() == x.stride() for t in every):
        return [AxisView(1, x.numel(), 1, 0, 1, 0)] * len(every)
    at = x.ndim - 1 if dim is None else dim
    found = []
    for t in every:
        lead, rest = collapsed(t.shape[:at], t.stride()[:at]), collapsed(t.shape[at + 1 :], t.stride()[at + 1 :])
        if lead is None or rest is None:
            return None
        found.append(AxisView(lead[0], t.shape[at], rest[0], lead[1], t.stride(at) if t.shape[at] > 1 else 1, rest[1]))
    v = found[0]
    if v.K == 1 and v.m < v.n and not (dim is None and in_order):
        # a transposed matrix: its rows are columns of memory
        return [AxisView(1, v.N, v.M, 0, v.n, v.m) for v in found]
    return found


def result_strides(y: Tensor, dim: int, keepdim: bool) -> tuple[int, int] | None:
    """The strides before and after ``dim`` of a tensor of a result's shape; None where the dimensions have no common stride."""
    y = y.squeeze(dim) if keepdim else y
    lead, rest = collapsed(y.shape[:dim], y.stride()[:dim]), collapsed(y.shape[dim:], y.stride()[dim:])
    return None if lead is None or rest is None else (lead[1], rest[1])


def collapsed(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Some dimensions as one (size, stride), with stride 0 for a single element; None without a common stride."""
    total, first = 1, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if total == 1:
            first = stride
        elif stride != first * total:
            return None
        total *= size
    return total, first
