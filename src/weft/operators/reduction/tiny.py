"""The plan of ``tiny.cu``: dense rows of 3 to 7 elements of 16 bits, read 16 bytes at a time."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.reduction.plans import Formula
from weft.operators.reduction.views import View

SOURCE = Path(__file__).parent / "tiny.cu"
EXTENTS = (3, 5, 6, 7)  # rows of 2, 4 and 8 are as wide as a load: Triton reads them as one stretch of memory
FROM = 2**20  # elements from which public functions choose it: below, launching is what counts
ROWS = 256  # of a warp
THREADS = 256
MOST_BLOCKS = 2**31 - 1  # of a grid, along x


def why_not(x: Tensor, v: View, dtype: torch.dtype, formula: Formula | None) -> str:
    """Why the kernel does not take this view of x with a result of a dtype (an empty string when it does)."""
    if formula is None or formula.compared:
        return "the kernel takes sums and maxima, and norms of order 1, 2 and inf"
    if x.dtype not in (torch.float16, torch.bfloat16) or dtype != x.dtype:
        return f"{x.dtype} to {dtype}; the kernel takes 16-bit floats and gives the same"
    if v.N not in EXTENTS or v.K != 1 or v.n != 1 or (v.M > 1 and v.m != v.N):
        return f"not dense rows of {', '.join(map(str, EXTENTS))} elements"
    if not pointer_aligned(x):
        return "memory that does not begin on 16 bytes"
    if -(-v.M // (ROWS * THREADS // 32)) > MOST_BLOCKS:
        return f"{v.M} rows; a grid has at most {MOST_BLOCKS} blocks"
    return ""


def plan(x: Tensor, v: View, dtype: torch.dtype, formula: Formula | None, divisor: float) -> CudaPlan:
    """The launch, to be called with ``(x, out)``; raises Declined as :func:`why_not` says."""
    reason = why_not(x, v, dtype, formula)
    if formula is None or reason:
        raise Declined(reason)
    warps = THREADS // 32
    parts = (formula.map, formula.join[0], formula.finish)
    names = ", ".join(part.fn.__name__ for part in parts)  # tiny.cu has a struct of each Triton function's name
    kernel = f"reduce_tiny<{CTYPES[x.dtype]}, {v.N}, {names}, {THREADS}>"
    scalars = (ctypes.c_longlong(v.M), ctypes.c_float(divisor))
    shared = warps * ROWS * v.N * x.element_size()
    return CudaPlan(SOURCE, kernel, (-(-v.M // (warps * ROWS)), 1), THREADS, scalars, shared_bytes=shared)
