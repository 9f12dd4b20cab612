"""Triton kernels of structured sparsity: pruning to 2:4, products of 2:4 matrices, and of matrices of dense blocks."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan

# ---- pruning to 2:4 --------------------------------------------------------------------------------------------------


@triton.jit
def magnitude(x):
    size = tl.abs(x.to(tl.float32))
    return tl.where(size == size, size, float("inf"))


@triton.jit
def keep_two_of_four(x_ptr, y_ptr, N, in_row, row_stride, col_stride, FLAT: tl.constexpr, TILE: tl.constexpr):
    """A tile of groups: of equal magnitudes the earlier stays; NaN counts as infinite. FLAT: x is contiguous."""
    base = tl.program_id(0).to(tl.int64) * TILE * 4
    at = base + tl.arange(0, TILE * 4)
    inside = at < N
    if FLAT:
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
    else:
        row, col = at // in_row, at % in_row
        x = tl.load(x_ptr + row * row_stride + col * col_stride, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x, [TILE, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    m0, m1, m2, m3 = magnitude(x0), magnitude(x1), magnitude(x2), magnitude(x3)
    b0 = (m1 > m0).to(tl.int32) + (m2 > m0).to(tl.int32) + (m3 > m0).to(tl.int32)
    b1 = (m0 >= m1).to(tl.int32) + (m2 > m1).to(tl.int32) + (m3 > m1).to(tl.int32)
    b2 = (m0 >= m2).to(tl.int32) + (m1 >= m2).to(tl.int32) + (m3 > m2).to(tl.int32)
    b3 = (m0 >= m3).to(tl.int32) + (m1 >= m3).to(tl.int32) + (m2 >= m3).to(tl.int32)
    zero = tl.zeros_like(x0)
    y0, y1 = tl.where(b0 < 2, x0, zero), tl.where(b1 < 2, x1, zero)
    y2, y3 = tl.where(b2 < 2, x2, zero), tl.where(b3 < 2, x3, zero)
    y = tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), [TILE * 4])
    tl.store(y_ptr + at, y, mask=inside)


def prune_heuristic(sm: int, dtype: torch.dtype) -> Config:
    """16 elements a thread."""
    return {"TILE": 512, "num_warps": 4}


def prune_candidates(sm: int, dtype: torch.dtype) -> Any:
    every = grid_of({"TILE": (256, 512, 1024, 2048), "num_warps": (2, 4, 8)})
    return [c for c in every if 8 <= c["TILE"] * 4 // (32 * c["num_warps"]) <= 32]


prune_configuration = Configurations(__file__, "prune_2_4", prune_heuristic, prune_candidates)


def prune_plan(x: Tensor) -> Plan:
    """Of ``(x, y)``: x [M, K] of any strides, y contiguous."""
    config = prune_configuration(x.device, x.dtype)
    groups, tile = x.numel() // 4, 64 if INTERPRETING else config["TILE"]
    scalars = (x.numel(), x.shape[1], *x.stride())
    constants = {"FLAT": x.is_contiguous(), "TILE": tile}
    return Plan(keep_two_of_four, (triton.cdiv(groups, tile),), scalars, constants, config["num_warps"])


# ---- 2:4 times dense -------------------------------------------------------------------------------------------------


@triton.jit
def unpacked(place, first, second, low, high):
    """The element at one place of its group: one of the two that are stored, or zero."""
    return tl.where(low == place, first, tl.where(high == place, second, tl.zeros_like(first)))


@triton.jit
def multiply_unpacked(
    values_ptr, metadata_ptr, b_ptr, c_ptr, M, N, K, b_row, b_col,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One TILE_M × TILE_N tile of C. Of DEPTH columns of A, DEPTH / 2 values and a 4-bit code for each group of four are read;
    selections put the values in their places, and the matrix units multiply."""
    tiles_n = tl.cdiv(N, TILE_N)
    m = (tl.program_id(0) // tiles_n).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = ((tl.program_id(0) % tiles_n) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    pair, group, k = tl.arange(0, DEPTH // 2), tl.arange(0, DEPTH // 4), tl.arange(0, DEPTH)
    rows = m[:, None] < M
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, DEPTH):
        at = start // 2 + pair
        stored = tl.load(
            values_ptr + m[:, None] * (K // 2) + at[None, :], mask=rows & (at[None, :] < K // 2), other=0.0
        )
        at = start // 4 + group
        word = tl.load(
            metadata_ptr + m[:, None] * (K // 16) + (at // 4)[None, :], mask=rows & (at[None, :] < K // 4), other=0
        )
        code = word.to(tl.int32) >> ((at % 4) * 4)[None, :]
        low, high = code & 3, (code >> 2) & 3
        first, second = tl.split(tl.reshape(stored, [TILE_M, DEPTH // 4, 2]))
        even = tl.join(unpacked(0, first, second, low, high), unpacked(2, first, second, low, high))
        odd = tl.join(unpacked(1, first, second, low, high), unpacked(3, first, second, low, high))
        a = tl.reshape(tl.join(even, odd), [TILE_M, DEPTH])
        inside = (start + k[:, None] < K) & (n[None, :] < N)
        b = tl.load(b_ptr + (start + k).to(tl.int64)[:, None] * b_row + n[None, :] * b_col, mask=inside, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total.to(c_ptr.dtype.element_ty), mask=rows & (n[None, :] < N))


def sparse_2_4_heuristic(sm: int, dtype: torch.dtype, m: int, n: int) -> Config:
    """A tile that leaves registers for the unpacking."""
    if INTERPRETING:
        return _config(32, 32, 32, 4, 2)
    depth = 32 if dtype == torch.float32 else 64
    if min(m, n) <= 64:
        return _config(64, 64, depth, 4, 2)
    return _config(128, 128, depth, 8, 2 if sm in (86, 89, 120) else 3)


def _config(m: int, n: int, depth: int, warps: int, stages: int) -> Config:
    return {"TILE_M": m, "TILE_N": n, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


def sparse_2_4_candidates(sm: int, dtype: torch.dtype, m: int, n: int) -> Any:
    limit = 232448 if sm in (90, 100) else 101376 if sm in (86, 89, 120) else 166912
    choices = {
        "TILE_M": (64, 128),
        "TILE_N": (64, 128, 256),
        "DEPTH": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    }
    for c in grid_of(choices):
        shared = (c["TILE_M"] + c["TILE_N"]) * c["DEPTH"] * dtype.itemsize * c["num_stages"]
        if 32 <= c["TILE_M"] * c["TILE_N"] // (32 * c["num_warps"]) <= 128 and shared <= limit:
            yield c


sparse_2_4_configuration = Configurations(__file__, "sparse_2_4_matmul", sparse_2_4_heuristic, sparse_2_4_candidates)


def sparse_2_4_plan(values: Tensor, metadata: Tensor, b: Tensor, precision: str) -> Plan:
    """Of ``(values, metadata, b, c)``."""
    m, (k, n) = len(values), b.shape
    config = sparse_2_4_configuration(b.device, b.dtype, bucket(m), bucket(n))
    tile = {name: config[name] for name in ("TILE_M", "TILE_N", "DEPTH")}
    grid = (triton.cdiv(m, tile["TILE_M"]) * triton.cdiv(n, tile["TILE_N"]),)
    constants = {**tile, "PRECISION": precision}
    return Plan(multiply_unpacked, grid, (m, n, k, *b.stride()), constants, config["num_warps"], config["num_stages"])


# ---- blocks times dense ----------------------------------------------------------------------------------------------


@triton.jit
def blocks_times_dense(
    offsets_ptr, columns_ptr, values_ptr, b_ptr, y_ptr, K, b_row, b_col,
    BLOCK: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One TILE_M × TILE_K tile of Y within a block row: its blocks one after the other, DEPTH columns of a block at a time."""
    tiles_k = tl.cdiv(K, TILE_K)
    tile_m = tl.program_id(0) // tiles_k
    block_row = tile_m // (BLOCK // TILE_M)
    m = (tile_m % (BLOCK // TILE_M)) * TILE_M + tl.arange(0, TILE_M)
    k = ((tl.program_id(0) % tiles_k) * TILE_K + tl.arange(0, TILE_K)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    first = tl.load(offsets_ptr + block_row)
    last = tl.load(offsets_ptr + block_row + 1)
    total = tl.zeros([TILE_M, TILE_K], tl.float32)
    for step in range(0, (last - first) * (BLOCK // DEPTH)):  # one loop, so that loads run ahead across blocks
        z = first + step // (BLOCK // DEPTH)
        start = step % (BLOCK // DEPTH) * DEPTH
        column = tl.load(columns_ptr + z).to(tl.int64)
        a = tl.load(values_ptr + z.to(tl.int64) * (BLOCK * BLOCK) + m[:, None] * BLOCK + (start + depth)[None, :])
        n = column * BLOCK + start + depth
        b = tl.load(b_ptr + n[:, None] * b_row + k[None, :] * b_col, mask=k[None, :] < K, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    row = block_row.to(tl.int64) * BLOCK + m
    tl.store(y_ptr + row[:, None] * K + k[None, :], total.to(y_ptr.dtype.element_ty), mask=k[None, :] < K)


def bsr_heuristic(sm: int, dtype: torch.dtype, block: int, k: int) -> Config:
    """A tile of Y as wide as registers allow; two stages where shared memory is 99 KiB."""
    tile_k = max(min(k, 128), 16)
    depth = min(block, 32 if dtype == torch.float32 else 64)
    stages = 2 if sm in (86, 89, 120) else 3
    return {
        "TILE_M": block,
        "TILE_K": tile_k,
        "DEPTH": depth,
        "num_warps": 8 if block * tile_k >= 128 * 128 else 4,
        "num_stages": stages,
    }


def bsr_candidates(sm: int, dtype: torch.dtype, block: int, k: int) -> Any:
    choices = {
        "TILE_M": tuple(b for b in (16, 32, 64, 128) if b <= block),
        "TILE_K": (32, 64, 128, 256),
        "DEPTH": tuple(d for d in (16, 32, 64, 128) if d <= block),
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4),
    }
    limit = 232448 if sm in (90, 100) else 101376 if sm in (86, 89, 120) else 166912
    for c in grid_of(choices):
        shared = (c["TILE_M"] + c["TILE_K"]) * c["DEPTH"] * dtype.itemsize * c["num_stages"]
        if 8 <= c["TILE_M"] * c["TILE_K"] // (32 * c["num_warps"]) <= 128 and shared <= limit:
            yield c


bsr_configuration = Configurations(__file__, "bsr_matmul", bsr_heuristic, bsr_candidates)


def bsr_plan(offsets: Tensor, columns: Tensor, values: Tensor, b: Tensor, precision: str) -> Plan:
    """Of ``(offsets, columns, values, b, y)``."""
    k, block = b.shape[1], values.shape[1]
    config = bsr_configuration(b.device, b.dtype, block, bucket(k, 16))
    tile = {name: config[name] for name in ("TILE_M", "TILE_K", "DEPTH")}
    tile["TILE_K"] = min(tile["TILE_K"], bucket(k, 16))
    grid = ((len(offsets) - 1) * (block // tile["TILE_M"]) * triton.cdiv(k, tile["TILE_K"]),)
    constants = {"BLOCK": block, **tile, "PRECISION": precision}
    return Plan(blocks_times_dense, grid, (k, *b.stride()), constants, config["num_warps"], config["num_stages"])
