"""Kernels of ``weft bandwidth``: a copy, a chain of dependent loads, a touch of every element."""

import triton
import triton.language as tl


@triton.jit
def copy(x, y, n, block: tl.constexpr):
    """``y[i] = x[i]`` for ``n`` int32, by as many programs as there are, each over every so many blocks."""
    for start in range(tl.program_id(0), tl.cdiv(n, block), tl.num_programs(0)):
        i = tl.cast(start, tl.int64) * block + tl.arange(0, block)
        tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def chase(x, out, steps):
    """Follows ``x[i]`` from 0 for so many steps."""
    i = 0
    for _ in range(steps):
        i = tl.load(x + i, volatile=True)
    tl.store(out, i)


@triton.jit
def touch(x, n, block: tl.constexpr):
    """Adds 1 to each of ``n`` int32."""
    for start in range(tl.program_id(0), tl.cdiv(n, block), tl.num_programs(0)):
        i = tl.cast(start, tl.int64) * block + tl.arange(0, block)
        tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
