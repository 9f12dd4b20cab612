"""The launches of ``kept_tiny.cu``: extrema of dense rows of 3, 5, 6 or 7 elements with their bits; gradients of these."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.reduction import kernels
from weft.operators.reduction.plans import Formula
from weft.operators.reduction.tiny import EXTENTS, MOST_BLOCKS
from weft.operators.reduction.views import View

SOURCE = Path(__file__).parent / "kept_tiny.cu"
THREADS = 256


def why_not(x: Tensor, v: View, dx: View) -> str:
    """Why the kernels do not take this view of x (an empty string when they do)."""
    if v.N not in EXTENTS or any(w.K != 1 or w.n != 1 or (w.M > 1 and w.m != w.N) for w in (v, dx)):
        return f"not dense rows of {', '.join(map(str, EXTENTS))} elements"
    if not pointer_aligned(x):
        return "memory that does not begin on 16 bytes"
    if -(-v.M // rows_of_block(x.dtype)) > MOST_BLOCKS:
        return f"{v.M} rows; a grid has at most {MOST_BLOCKS} blocks"
    return ""


def rows_of_block(dtype: torch.dtype) -> int:
    return THREADS * 16 // dtype.itemsize


class KeptRows:
    """As ``kept.KeptTiles``."""

    def __init__(self, x: Tensor, v: View, dx: View, formula: Formula):
        if reason := why_not(x, v, dx):
            raise Declined(reason)
        name, rows = CTYPES[x.dtype], rows_of_block(x.dtype)
        smallest = str(formula.map is kernels.negative).lower()
        grid, scalars = (-(-v.M // rows), 1), (ctypes.c_longlong(v.M),)
        shared = rows * v.N * x.dtype.itemsize

        def plan(expression: str) -> CudaPlan:
            return CudaPlan(SOURCE, expression, grid, THREADS, scalars, shared_bytes=shared)

        self.keep = plan(f"keep_tiny<{name}, {v.N}, {smallest}, {THREADS}>")
        self.shared = plan(f"share_tiny<{name}, {v.N}, {THREADS}>")

    def share(self, dy: Tensor, bits: Tensor, dx: Tensor, strides: tuple[int, int]) -> None:
        if (dy.numel() > 1 and strides[0] != 1) or not pointer_aligned(dy):
            dy = dy.clone(memory_format=torch.contiguous_format)  # one element a result
        self.shared(dy, bits, dx)
