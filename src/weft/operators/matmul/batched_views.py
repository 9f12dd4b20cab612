"""Batches of matrices as kernels take them: with as few batch dimensions as their strides allow, and as rows where they can be.

Shapes: a [..., M, K], b [..., K, N]; batch dimensions broadcast. A *level* is a batch dimension that is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor


def batch_of(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The batch dimensions of the product.

    Raises:
        RuntimeError: they do not broadcast.
    """
    return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))


def result_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return (*batch_of(a, b), a.shape[-2], b.shape[-1])


def expanded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both with all batch dimensions; those that were broadcast have stride 0."""
    batch = batch_of(a, b)
    return a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])


def forms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same memory as [*levels, M, K] and [*levels, K, N] with the fewest levels: neighbours that both operands step through
    alike are one, and the innermost goes to the rows of a where b stands still and a's matrices follow one another.

    The product's elements keep their order, so a contiguous result is the same memory as well. For launches, not for autograd:
    it goes by strides, and what was expanded before it came here is seen through.
    """
    (m, k), n = a.shape[-2:], b.shape[-1]
    a, b = expanded(a, b)
    levels: list[tuple[int, int, int]] = []  # size, steps in a and in b; outermost first
    for size, step_a, step_b in zip(a.shape[:-2], a.stride(), b.stride(), strict=False):
        if size == 1:
            continue
        if levels and levels[-1][1:] == (size * step_a, size * step_b):
            levels[-1] = (levels[-1][0] * size, step_a, step_b)
        else:
            levels.append((size, step_a, step_b))
    row = a.stride(-2)
    if levels and levels[-1][2] == 0 and (m == 1 or levels[-1][1] == m * row):
        size, step, _ = levels.pop()
        m, row = m * size, step if m == 1 else row
    sizes, of_a, of_b = ([level[i] for level in levels] for i in range(3))
    return (
        a.as_strided([*sizes, m, k], [*of_a, row, a.stride(-1)]),
        b.as_strided([*sizes, k, n], [*of_b, *b.stride()[-2:]]),
    )


def rows_follow(a: Tensor, levels: int) -> bool:
    """Whether the last ``levels`` batch dimensions of a and its rows are one dimension."""
    outer = a.ndim - 2 - levels
    sizes, strides = a.shape[outer:-1], a.stride()[outer:-1]
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return all(step == size * stride for (_, step), (size, stride) in itertools.pairwise(kept))


def differentiably(
    a: Tensor, b: Tensor, plain: Callable[[Tensor, Tensor], Tensor], batched: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The product by views that autograd follows: by ``plain`` of two matrices, or by ``batched`` of equal batch dimensions.

    Inner batch dimensions of which b has but one matrix become rows of a, where strides allow it: then the gradient of b, a sum
    over them, is part of its product. An operand that is broadcast otherwise keeps its one matrix, in as many dimensions.
    """
    batch, (m, k), n = batch_of(a, b), a.shape[-2:], b.shape[-1]
    a, b = (t[(None,) * (len(batch) + 2 - t.ndim)] for t in (a, b))
    outer, rows = len(batch), a.expand(*batch, m, k)
    while outer and b.shape[outer - 1] == 1 and rows_follow(rows, len(batch) - outer + 1):
        outer -= 1
    count = m
    for size in batch[outer:]:
        count *= size
    alone = all(size == 1 for size in batch[:outer])
    lead_a, lead_b = ((), ()) if alone else (tuple(a.shape[:outer]), tuple(b.shape[:outer]))
    shape = (*batch, m, n)
    a, b = a.expand(*a.shape[:outer], *batch[outer:], m, k).view(*lead_a, count, k), b.view(*lead_b, k, n)
    return (plain(a, b) if alone else batched(a, b)).view(shape)
