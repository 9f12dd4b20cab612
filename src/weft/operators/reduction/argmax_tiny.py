"""The launch of ``argmax_tiny.cu``: ``argmax`` of dense rows of 2 to 8 elements."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.reduction.tiny import MOST_BLOCKS
from weft.operators.reduction.views import View

SOURCE = Path(__file__).parent / "argmax_tiny.cu"
THREADS = 256
SLOWER = {
    2: (6,),
    4: (6, 7),
}  # by bytes of an element, on an H200: 630 us against 621, 997 and 1120 against 960 and 1085


def rows_of_block(x: Tensor) -> int:
    return THREADS * 16 // x.element_size()


def why_not(x: Tensor, v: View) -> str:
    """Why the kernel does not take this view of x (an empty string when it does)."""
    most = 8 if x.element_size() == 2 else 7  # fp32 rows of 8: all lanes' vectors would lie in the same banks
    if not 2 <= v.N <= most or v.K != 1 or v.n != 1 or (v.M > 1 and v.m != v.N):
        return f"not dense rows of 2 to {most} elements of {x.dtype}"
    if not pointer_aligned(x):
        return "memory that does not begin on 16 bytes"
    if -(-v.M // rows_of_block(x)) > MOST_BLOCKS:
        return f"{v.M} rows; a grid has at most {MOST_BLOCKS} blocks"
    return ""


def slower(x: Tensor, v: View) -> str:
    """Why Triton's kernel is the faster one for rows that this one takes (an empty string when it is not)."""
    return f"rows of {v.N} elements of {x.dtype}" if v.N in SLOWER[x.element_size()] else ""


def plan(x: Tensor, v: View) -> CudaPlan:
    """The launch, to be called with ``(x, places)``, int64 and dense.

    Raises:
        Declined: :func:`why_not`.
    """
    if reason := why_not(x, v):
        raise Declined(reason)
    rows, size = rows_of_block(x), x.element_size()
    kernel = f"argmax_tiny<{CTYPES[x.dtype]}, {v.N}, {THREADS}>"
    scalars = (ctypes.c_longlong(v.M),)
    return CudaPlan(SOURCE, kernel, (-(-v.M // rows), 1), THREADS, scalars, shared_bytes=rows * v.N * size)
