"""Triton kernels of this family, and the plans of those that several operators launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, grid_of
from weft.operators.launch import Plan

THREADS = 256  # of a block where the pattern says how many


@triton.jit
def copy_strided(x_ptr, y_ptr, n, stride, BLOCK: tl.constexpr):
    """y[i] = x[i * stride] for i < n. One program writes BLOCK elements; the stride 1 is a constant to the compiler."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: tensors may hold more than 2**31 elements
    tl.store(y_ptr + i, tl.load(x_ptr + i * stride, mask=i < n, eviction_policy="evict_last"), mask=i < n)


@triton.jit
def gather_blocks(x_ptr, index_ptr, y_ptr, n, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """y[i, :] = x[index[i], :] for i < n, x: [*, WIDTH]. One program moves BLOCKS of them."""
    i = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (i < n)[:, None]
    source = tl.load(index_ptr + i, mask=i < n, other=0)
    col = tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + source[:, None] * WIDTH + col, mask=inside, eviction_policy="evict_last")
    tl.store(y_ptr + i[:, None] * WIDTH + col, x, mask=inside)


@triton.jit
def part_maxima(x_ptr, y_ptr, n, parts, PART: tl.constexpr):
    """y[pass, part] = max of x[part * PART …], n elements in all; grid passes * parts. Past L1, whose 256 KiB would answer."""
    part = tl.program_id(0) % parts
    i = part.to(tl.int64) * PART + tl.arange(0, PART)
    x = tl.load(x_ptr + i, mask=i < n, other=-float("inf"), cache_modifier=".cg")
    tl.store(y_ptr + tl.program_id(0), tl.max(x, 0))


@triton.jit
def tile_maxima(x_ptr, y_ptr, n, stride, TILE: tl.constexpr, READS: tl.constexpr):
    """Within each tile of TILE elements: y[t] = max over r < READS of x[(t * stride + r) % TILE]; one program a tile.

    Triton decides itself what lies in shared memory: this one gathers from L1, which is the same memory.
    """
    first = tl.program_id(0).to(tl.int64) * TILE
    t = tl.arange(0, TILE)
    best = tl.full([TILE], -float("inf"), tl.float32)
    for r in tl.static_range(READS):
        at = first + (t * stride + r) % TILE
        best = tl.maximum(best, tl.load(x_ptr + at, mask=at < n, other=-float("inf")).to(tl.float32))
    tl.store(y_ptr + first + t, best.to(y_ptr.dtype.element_ty), mask=first + t < n)


# ---- plans -----------------------------------------------------------------------------------------------------------


def heuristic(sm: int, dtype: torch.dtype, stride: int) -> Config:
    return {"BLOCK": 1024 if stride == 1 else 512, "num_warps": 4}


def candidates(sm: int, dtype: torch.dtype, stride: int) -> Any:
    every = grid_of({"BLOCK": (256, 512, 1024, 2048, 4096), "num_warps": (2, 4, 8)})
    return [c for c in every if 4 <= c["BLOCK"] // (32 * c["num_warps"]) <= 32]


configuration = Configurations(__file__, "copy_strided", heuristic, candidates)


def copy_plan(x: Tensor, stride: int = 1) -> Plan:
    """y = x[::stride] for a contiguous x of one dimension."""
    n = -(-x.numel() // stride)
    config = configuration(x.device, x.dtype, stride)
    grid = (triton.cdiv(n, config["BLOCK"]),)
    return Plan(copy_strided, grid, (n, stride), {"BLOCK": config["BLOCK"]}, config["num_warps"])
