"""Triton kernels that transpose."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP: tl.constexpr, DIAGONAL: tl.constexpr):
    """Which tile a program of one matrix takes: (tile row, tile column).

    Programs that run at the same time have neighbouring numbers. In bands of GROUP tile rows, walked down and then right,
    they share the rows of x *and* the rows of y that they touch: GROUP=1 walks along the rows of x, a large one along
    those of y. DIAGONAL shifts every tile row by one tile more, so that neighbours differ in both.
    """
    band = program // (GROUP * tiles_n)
    height = min(tiles_m - band * GROUP, GROUP)
    inside = program % (GROUP * tiles_n)
    m, n = band * GROUP + inside % height, inside // height
    if DIAGONAL:
        n = (n + m) % tiles_n
    return m, n


@triton.jit
def transpose_tiles(
    x_ptr, y_ptr, M, N, B1, x_b0, x_b1, x_row, x_col,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """y[b, n, m] = x[b, m, n]. x: matrices of any strides; y: contiguous. One program moves R rows and C columns of x.

    EVEN says that tiles fill the matrix: loads then need no predicate (with a cache hint, one costs a branch).
    """
    tiles_m, tiles_n = tl.cdiv(M, R), tl.cdiv(N, C)
    b = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP, DIAGONAL)
    row = tile_m.to(tl.int64) * R + tl.arange(0, R)  # int64: tensors may hold more than 2**31 elements
    col = tile_n.to(tl.int64) * C + tl.arange(0, C)
    x_ptr += (b // B1).to(tl.int64) * x_b0 + (b % B1).to(tl.int64) * x_b1
    y_ptr += b.to(tl.int64) * M * N
    x_at = x_ptr + row[:, None] * x_row + col[None, :] * x_col
    y_at = y_ptr + col[:, None] * M + row[None, :]
    if EVEN:
        x = tl.load(x_at, eviction_policy="evict_last")  # the hint: docs/notes/softmax.md
        tl.store(y_at, tl.trans(x))
    else:
        x = tl.load(x_at, mask=(row < M)[:, None] & (col < N)[None, :], eviction_policy="evict_last")
        tl.store(y_at, tl.trans(x), mask=(col < N)[:, None] & (row < M)[None, :])


@triton.jit
def transpose_small(
    x_ptr, y_ptr, B, M, N, B1, x_b0, x_b1, x_row, x_col, BB: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The same for matrices smaller than a tile: one program moves BB whole ones."""
    b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)[:, None, None]
    row, col = tl.arange(0, R), tl.arange(0, C)
    x_at = x_ptr + (b // B1) * x_b0 + (b % B1) * x_b1 + row[None, :, None] * x_row + col[None, None, :] * x_col
    x = tl.load(x_at, mask=(b < B) & (row < M)[None, :, None] & (col < N)[None, None, :], eviction_policy="evict_last")
    y_at = y_ptr + b * M * N + col[None, :, None] * M + row[None, None, :]
    inside = (b < B) & (col < N)[None, :, None] & (row < M)[None, None, :]
    tl.store(y_at, tl.permute(x, (0, 2, 1)), mask=inside)
