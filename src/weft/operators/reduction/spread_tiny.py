"""The launch of ``spread_tiny.cu``: the gradient of norms of order 1 and 2 of dense rows of 3, 5, 6 or 7 elements."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.reduction import kept_tiny, kernels
from weft.operators.reduction.plans import Spread
from weft.operators.reduction.views import View

SOURCE = Path(__file__).parent / "spread_tiny.cu"
THREADS = kept_tiny.THREADS
NAMES = {kernels.direction: "direction", kernels.signed: "signed_by"}  # "signed" is C++'s


def why_not(x: Tensor, v: View, dx: View, spread: Spread) -> str:
    """Why the kernel does not take this view of x (an empty string when it does)."""
    if spread.gradient not in NAMES:
        return "the kernel takes gradients of norms of order 1 and 2"
    return kept_tiny.why_not(x, v, dx)


def plan(x: Tensor, dy: Tensor, v: View, dx: View, strides: tuple[int, int], spread: Spread) -> CudaPlan:
    """The launch, to be called with ``(x, y, dy, dx)``, y dense and of x's dtype.

    Raises:
        Declined: the gradient is not that of a norm of order 1 or 2 of dense rows of such extents on 16 bytes.
    """
    if reason := why_not(x, v, dx, spread):
        raise Declined(reason)
    if dy.dtype != x.dtype:
        raise Declined(f"a gradient of {dy.dtype} for {x.dtype}; the kernel takes one dtype for both")
    if (v.M > 1 and strides[0] != 1) or not pointer_aligned(dy):
        raise Declined("a gradient that is not dense, or does not begin on 16 bytes")
    rows = kept_tiny.rows_of_block(x.dtype)
    kernel = f"spread_tiny<{CTYPES[x.dtype]}, {v.N}, {NAMES[spread.gradient]}, {THREADS}>"
    shared = rows * v.N * x.element_size()
    return CudaPlan(SOURCE, kernel, (-(-v.M // rows), 1), THREADS, (ctypes.c_longlong(v.M),), shared_bytes=shared)
