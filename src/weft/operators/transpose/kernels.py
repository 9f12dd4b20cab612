"""Triton kernels that transpose, and how they are launched."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import Plan, Plans
from weft.operators.transpose import vectors
from weft.operators.transpose.layout import one_grid, require, size_class

# ---- kernels ---------------------------------------------------------------------------------------------------------


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
        x = tl.load(x_at, eviction_policy="evict_last")  # the hint: softmax/README.md
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


# ---- plans -----------------------------------------------------------------------------------------------------------

SMALL_MATRIX = 1024  # elements up to which several matrices share a program
TILE = 4096  # elements of a tile of several matrices, or of one that the matrix makes narrower than configured


def heuristic(sm: int, dtype: torch.dtype, n: int, access: str) -> Config:
    """Tiles whose rows are whole 128-byte lines on both sides; bands of 4 KiB of rows of y. Where accesses are single elements,
    each has an address of its own in registers: 16 a thread (32 spill)."""
    warps = 4 if access == "vectors" else 8
    return {"R": 64, "C": 64, "num_warps": warps, "GROUP": 64 // dtype.itemsize, "DIAGONAL": 0}


def candidates(sm: int, dtype: torch.dtype, n: int, access: str) -> Any:
    sides = (32, 64, 128, 256)
    orders = [(1, 0), (1, 1), (4, 0), (8, 0), (16, 0), (32, 0)]
    for c in grid_of({"R": sides, "C": sides, "num_warps": (2, 4, 8, 16)}):
        lines = min(c["R"], c["C"]) * dtype.itemsize >= 128
        each = c["R"] * c["C"] // (c["num_warps"] * 32)  # elements a thread
        fits = 16 <= each * dtype.itemsize // 4 <= 32 if access == "vectors" else 8 <= each <= 16
        if lines and fits:
            yield from ({**c, "GROUP": group, "DIAGONAL": diagonal} for group, diagonal in orders)


configuration = Configurations(__file__, "transpose_tiles", heuristic, candidates)


def plan(x: Tensor) -> Plan:
    """The launch that writes x.mT, contiguous.

    Raises:
        Declined: leading dimensions that do not collapse; more tiles than a grid has.
    """
    m = require(x)
    strides = (m.b0, m.b1, m.row, m.col)
    if m.M * m.N <= SMALL_MATRIX and m.batch > 1:
        r, c = bucket(m.M), bucket(m.N)
        bb = min(bucket(m.batch), TILE // (r * c))
        grid = one_grid(triton.cdiv(m.batch, bb))
        return Plan(transpose_small, (grid,), (m.batch, m.M, m.N, m.B1, *strides), {"BB": bb, "R": r, "C": c}, 8)
    config = configuration(x.device, x.dtype, size_class(x), "elements" if vectors.why_not(x) else "vectors")
    r, c = fitted(config["R"], config["C"], m.M, m.N)
    tile = {
        "R": r,
        "C": c,
        "EVEN": m.M % r == 0 and m.N % c == 0,
        "GROUP": config["GROUP"],
        "DIAGONAL": config["DIAGONAL"],
    }
    grid = one_grid(m.batch * triton.cdiv(m.M, r) * triton.cdiv(m.N, c))
    return Plan(transpose_tiles, (grid,), (m.M, m.N, m.B1, *strides), tile, config["num_warps"])


def fitted(r: int, c: int, m: int, n: int) -> tuple[int, int]:
    """Rows and columns of a tile in an m x n matrix: where one side is shorter than configured, the other is longer."""
    if n < c:
        c = bucket(n)
        r = max(r, min(TILE // c, bucket(m)))
    if m < r:
        r = bucket(m)
        c = max(c, min(TILE // r, bucket(n)))
    return r, c


plans = Plans(plan)
