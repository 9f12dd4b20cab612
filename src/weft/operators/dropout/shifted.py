"""Tiles of rows that begin anywhere, moved as vectors of 16 bytes.

A group of random numbers, and a vector, begins every 4 or 8 elements of a contiguous [M, N], wherever rows do. So a tile begins
where its row's first vector does, up to ``shift`` elements before the row. Rows ``PERIOD`` (a vector's elements) apart begin
alike, so a program takes such rows: one shift, one set of columns. With a PERIOD of 1 rows are taken in order, none is shifted.
"""

import triton
import triton.language as tl
from torch import Tensor

from weft.operators.cuda import pointer_aligned
from weft.operators.layout import views


@triton.jit
def rows_of(program, ROWS: tl.constexpr, PERIOD: tl.constexpr):
    """The rows, int64 [ROWS], of a program."""
    program = tl.zeros([ROWS], tl.int64) + program
    return (program // PERIOD * ROWS + tl.arange(0, ROWS)) * PERIOD + program % PERIOD


@triton.jit
def shift_of(program, stride, PERIOD: tl.constexpr):
    """By how many elements its rows, of this stride, begin after a vector does."""
    if PERIOD == 1:
        return 0
    else:
        return program % PERIOD * (stride % PERIOD) % PERIOD


@triton.jit
def takes_last(program, M, ROWS: tl.constexpr, PERIOD: tl.constexpr):
    """Whether the last row may be among its rows."""
    return (program // PERIOD + 1) * (ROWS * PERIOD) >= M


@triton.jit
def vectors_at(ptr, row, row_stride, col, shift, PERIOD: tl.constexpr):
    """The addresses of columns ``col - shift``, which are side by side."""
    return ptr + tl.multiple_of(row * row_stride - shift, PERIOD)[:, None] + col[None, :]


@triton.jit
def in_rows(row, col, M, N, shift, PERIOD: tl.constexpr):
    """Which elements of a tile are in rows."""
    if PERIOD == 1:
        return (row < M)[:, None] & (col < N)[None, :]
    else:
        return (row < M)[:, None] & ((col >= shift) & (col < N + shift))[None, :]


@triton.jit
def read_tile(ptr, row, row_stride, col_stride, col, M, N, shift, last, PERIOD: tl.constexpr, ALIKE: tl.constexpr):
    """The elements in fp32, with 0 where no row is, of a tensor whose rows begin at vectors as those of [M, N] do, or not
    ALIKE. Of vectors that lie across a row's ends the rest is read too, unless the row may be the ``last`` one."""
    VECTORS: tl.constexpr = PERIOD > 1 and ALIKE
    if VECTORS:
        at = vectors_at(ptr, row, row_stride, col, shift, PERIOD)
    else:
        at = ptr + row[:, None] * row_stride + (col - shift)[None, :] * col_stride
    inside = in_rows(row, col, M, N, shift, PERIOD)
    if VECTORS:
        if last:
            x = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last")
        else:
            vectors = (col // PERIOD * PERIOD < N + shift)[None, :]
            x = tl.load(at, mask=vectors, other=0.0, eviction_policy="evict_last")
        x = tl.where(inside, x, 0.0)
    else:
        x = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last")
    return x.to(tl.float32)


@triton.jit
def write_tile(ptr, row, col, M, N, shift, value, PERIOD: tl.constexpr):
    """Of a contiguous tensor: vectors that lie in a row are written whole, those across its ends by element."""
    if PERIOD == 1:
        at = ptr + row[:, None] * N + col[None, :]
    else:
        at = vectors_at(ptr, row, N, col, shift, PERIOD)
    inside = in_rows(row, col, M, N, shift, PERIOD)
    value = value.to(ptr.dtype.element_ty)
    if PERIOD == 1:
        tl.store(at, value, mask=inside)
    else:
        first = col // PERIOD * PERIOD
        whole = (row < M)[:, None] & ((first >= shift) & (first + PERIOD <= N + shift))[None, :]
        tl.store(at, value, mask=whole)
        tl.store(at, value, mask=inside & (whole == 0))


def lie_alike(*tensors: Tensor) -> bool:
    """Whether rows of all the tensors begin at the same element of a vector."""
    count, strides = 16 // tensors[0].element_size(), set()
    for t, (_, n, row, column) in zip(tensors, views(*tensors), strict=True):
        if t.dtype != tensors[0].dtype or column != 1 or n < count or not pointer_aligned(t):
            return False
        strides.add(row % count)
    return len(strides) == 1
