"""Contiguous copies of tensors whose rows of the last dimension lie side by side, as a transposed matrix has them."""

from typing import Any

import torch
from torch import Tensor

from weft.operators.autograd import KernelFunction, differentiable
from weft.operators.layout import rows_of
from weft.operators.transpose.dispatch import FORWARD as TRANSPOSE


def side_by_side(t: Tensor) -> bool:
    """Whether t's rows of the last dimension lie side by side: its columns are whole columns of rows apart."""
    rows = rows_of(t)
    if rows is None:
        return False
    m, n, row, column = rows
    return m > 1 and n > 1 and 0 < m * row <= column


def only_some(*tensors: Tensor) -> list[bool]:
    """Of tensors that are read together: which to copy because their rows lie side by side and those of others do not. A
    kernel would read or write one or the other kind by single sectors."""
    found = [side_by_side(t) for t in tensors]
    return found if False in found else [False] * len(found)


def as_if_contiguous(t: Tensor) -> Tensor:
    """A view of t's memory for a plan to be made from: of the shape and device of t, contiguous. t's rows lie side by side."""
    return t.as_strided(t.shape, torch.empty_like(t, device="meta", memory_format=torch.contiguous_format).stride())


def contiguous(t: Tensor) -> Tensor:
    """t, or a contiguous copy, by the transpose's kernels where columns are adjacent rows of memory."""
    if t.is_contiguous() or t.ndim < 2:
        return t.contiguous()
    rows = rows_of(t)
    flipped = t.mT if rows is None else t.as_strided((rows[1], rows[0]), (rows[3], rows[2]))
    if flipped.stride(-1) != 1 or (plan := TRANSPOSE.of((flipped,))) is None:
        return t.contiguous()
    copy = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    plan(flipped, copy)
    return copy


class Contiguous(KernelFunction):
    """The copy under autograd."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return contiguous(t)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def by_rows(t: Tensor) -> Tensor:
    """t, or a contiguous copy where its rows have no one stride or lie side by side."""
    return differentiable(Contiguous, t) if needs_copy(t) else t


def needs_copy(t: Tensor) -> bool:
    return not t.is_contiguous() and (rows_of(t) is None or side_by_side(t))
