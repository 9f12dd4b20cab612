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


def plan(x: Tensor, v: View) -> CudaPlan:
    """The launch, to be called with ``(x, places)``, int64 and dense.

    Raises:
        Declined: x is not dense rows of so many elements on 16 bytes, or they are too many for a grid.
    """
    size = x.element_size()
    most = 8 if size == 2 else 7  # fp32 rows of 8: all lanes' vectors would lie in the same banks of shared memory
    if not 2 <= v.N <= most or v.K != 1 or v.n != 1 or (v.M > 1 and v.m != v.N):
        raise Declined(f"not dense rows of 2 to {most} elements of {x.dtype}")
    if not pointer_aligned(x):
        raise Declined("memory that does not begin on 16 bytes")
    rows = THREADS * 16 // size
    if -(-v.M // rows) > MOST_BLOCKS:
        raise Declined(f"{v.M} rows; a grid has at most {MOST_BLOCKS} blocks")
    kernel = f"argmax_tiny<{CTYPES[x.dtype]}, {v.N}, {THREADS}>"
    scalars = (ctypes.c_longlong(v.M),)
    return CudaPlan(SOURCE, kernel, (-(-v.M // rows), 1), THREADS, scalars, shared_bytes=rows * v.N * size)
