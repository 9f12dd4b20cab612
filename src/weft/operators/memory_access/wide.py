"""Plans of ``patterns.cu``'s copy, whose accesses are as wide as asked for."""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from weft.operators.cuda import CTYPES, CudaPlan

SOURCE = Path(__file__).parent / "patterns.cu"
THREADS = 256


def copy_wide(x: Tensor, width: int, each: int) -> CudaPlan:
    """y = x in accesses of ``width`` bytes, ``each`` of them a thread."""
    vectors = x.numel() * x.element_size() // width
    blocks = max(-(-vectors // (THREADS * each)), 1)
    kernel = f"copy_wide<{CTYPES[x.dtype]}, {width}, {each}>"
    return CudaPlan(SOURCE, kernel, (blocks, 1), THREADS, (ctypes.c_longlong(x.numel()),))
