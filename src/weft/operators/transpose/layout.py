"""A tensor as a batch of matrices, and how a matrix is cut into tiles: what all transpose kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.definition import Declined

SIZES = (2**20, 2**24, 2**28)  # elements: tensors of up to so many share a configuration
MOST_BLOCKS = 2**31 - 1  # of a grid, along x


@dataclass(frozen=True)
class Matrices:
    """``B0 * B1`` matrices of M rows and N columns; strides in elements.

    Two batch axes, not one: attention's keys [batch, head, length, dim], a view of [batch, length, head, dim], have no one
    batch stride.
    """

    B0: int
    B1: int
    M: int
    N: int
    b0: int
    b1: int
    row: int
    col: int

    @property
    def batch(self) -> int:
        return self.B0 * self.B1

    @property
    def elements(self) -> int:
        return self.batch * self.M * self.N


def matrices_of(x: Tensor) -> Matrices | None:
    """x [..., M, N] as matrices, or None where its leading dimensions do not collapse into two of one stride each."""
    axes: list[tuple[int, int]] = []  # (size, stride), innermost first
    for size, stride in zip(reversed(x.shape[:-2]), reversed(x.stride()[:-2]), strict=True):
        if size == 1:
            continue
        if axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (size * axes[-1][0], axes[-1][1])
        else:
            axes.append((size, stride))
    if len(axes) > 2:
        return None
    (n1, s1), (n0, s0) = (*axes, (1, 0), (1, 0))[:2]
    return Matrices(n0, n1, x.shape[-2], x.shape[-1], s0, s1, x.stride(-2), x.stride(-1))


def require(x: Tensor) -> Matrices:
    """The matrices of x, or Declined."""
    found = matrices_of(x)
    if found is None:
        raise Declined("the leading dimensions do not collapse into two of one stride each, so a copy would be needed")
    return found


def size_class(x: Tensor) -> int:
    """The part of a configuration's key that says how large the tensor is."""
    return next((n for n in SIZES if x.numel() <= n), SIZES[-1])


def one_grid(blocks: int) -> int:
    """The number of blocks, or Declined where a grid cannot have so many."""
    if blocks > MOST_BLOCKS:
        raise Declined(f"{blocks} tiles; a grid has at most {MOST_BLOCKS}")
    return blocks


def result_like(x: Tensor) -> Tensor:
    """Where x.mT goes: contiguous."""
    return torch.empty((*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype, device=x.device)
