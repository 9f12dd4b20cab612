"""Batched products on Hopper's main loop (``gemm.cu``) in bf16 and fp16: all matrices in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.hopper import gemm
from weft.operators.hopper.gemm import HopperPlan
from weft.operators.hopper.tile_sizes import LINE, ROWS
from weft.operators.launch import Plans
from weft.operators.matmul.batched_views import forms

LEAST_COLUMNS = 64  # of a tile
USEFUL = 2 / 3  # of what tiles multiply: where less is, a batch is left to cuBLAS
LEAST_TERMS = 512  # of shorter sums, storing takes the time, which cuBLAS does faster (measured at 128)


def why_not(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> str:
    """Why the kernel does not take a [..., M, K] and b [..., K, N] for a result of their dtype or another (an empty string
    when it does)."""
    a, b = forms(a, b)
    if a.ndim > 3:
        return "batch dimensions that do not merge into one stride, which a tensor map of matrices has"
    matrices = a.shape[0] if a.ndim == 3 else 1
    if -(-a.shape[-2] // ROWS) * -(-b.shape[-1] // LEAST_COLUMNS) * matrices >= 2**31:
        return f"{matrices} matrices of more tiles than are counted"
    return gemm.why_not(a, b, dtype or a.dtype)


def slower(a: Tensor, b: Tensor) -> str:
    """Why matrices that the kernel takes are left to cuBLAS (an empty string when they are not)."""
    a, b = forms(a, b)
    if a.ndim == 2:
        return ""  # one product: as ``matmul``
    if a.shape[-1] < LEAST_TERMS:
        return f"sums of {a.shape[-1]} terms: storing takes the time, which cuBLAS does faster"
    useful, smallest = 1.0, (ROWS, LEAST_COLUMNS, LINE // a.element_size())
    for size, tile in zip((a.shape[-2], b.shape[-1], a.shape[-1]), smallest, strict=True):
        useful *= size / (-(-size // tile) * tile) if size else 0.0
    if useful >= USEFUL:
        return ""
    rows, columns, depth = smallest
    return (
        f"{useful:.0%} of the smallest tiles ({rows} × {columns}, {depth} terms deep) would be of use: left to cuBLAS"
    )


def plan(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> HopperPlan:
    """The launch of C = A·B into a new contiguous C of their dtype or another. Call it with (a, b, c).

    Raises:
        Declined: what :func:`why_not` says.
    """
    if reason := why_not(a, b, dtype):
        raise Declined(reason)
    return HopperPlan(*forms(a, b), dtype)


plans = Plans(plan)
