"""Dropout's one kernel, forward and backward, and its launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Configurations, bucket, grid_of
from weft.operators.dropout.philox import GROUP, dropped
from weft.operators.elementwise.dispatch import LARGE, SMALL, has_tail, like
from weft.operators.elementwise.kernels import place, read, whole, write
from weft.operators.launch import Plan
from weft.operators.layout import rows_of, views
from weft.operators.quotient import divided, quotient

SHORT = 400  # columns; a program of one such row has little to do, and much of it padding
MOST_DIVIDED = 2**31 - 2**16  # elements that 32 bits count, the last program's included


@triton.jit(do_not_specialize=["seed_ptr", "seed", "offset", "last", "scale", "factor", "shift"])
def drop(
    x_ptr, out_ptr, seed_ptr, seed: tl.uint64, offset: tl.uint64, last: tl.uint32, scale: tl.float32,
    M, N, x_row, x_col, out_row, out_col, factor, shift,
    BLOCK: tl.constexpr, PER: tl.constexpr, ORDER: tl.constexpr, SEED_IN_MEMORY: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """out = scale * x, or 0 where :func:`dropped` says so; x and out are [M, N] of any two strides.

    A program takes BLOCK neighbours in row-major order. ORDER says how: ``flat`` of one row; ``rows`` of one of many rows,
    each of which begins with a group of 8 (elements of one Philox call); ``any`` across the ends of rows; ``divided`` too,
    where out is contiguous and a multiplication finds the rows (``quotient``).
    """
    if ORDER == "rows":
        row, col = place(N, BLOCK)
        start = row * N + (tl.program_id(0) % ((N - 1) // BLOCK + 1)).to(tl.int64) * BLOCK
    else:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        row, col = 0, start + tl.arange(0, BLOCK)
    if ORDER == "any":
        row = col // N
        col = tl.where(row < M, col % N, N)  # beyond the end: masked
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    part = start.to(tl.uint64) // PER + tl.arange(0, BLOCK // PER)
    if ORDER == "divided":
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row = divided(at, factor, shift)
        col, row = (at - row * N).to(tl.int64), row.to(tl.int64)
        if (tl.program_id(0) + 1) * BLOCK <= M * N:
            x = dropped(read(x_ptr, row, col, x_row, x_col, row < M, False), part, seed, offset, last, PER)
            write(out_ptr, 0, at, 0, 1, row < M, x * scale, False)
        else:
            x = dropped(read(x_ptr, row, col, x_row, x_col, row < M), part, seed, offset, last, PER)
            write(out_ptr, 0, at, 0, 1, row < M, x * scale)
    elif TAIL:
        if whole(N, BLOCK):
            x = dropped(read(x_ptr, row, col, x_row, x_col, col < N, False), part, seed, offset, last, PER)
            write(out_ptr, row, col, out_row, out_col, col < N, x * scale, False)
        else:
            x = dropped(read(x_ptr, row, col, x_row, x_col, col < N), part, seed, offset, last, PER)
            write(out_ptr, row, col, out_row, out_col, col < N, x * scale)
    else:
        x = dropped(read(x_ptr, row, col, x_row, x_col, col < N), part, seed, offset, last, PER)
        write(out_ptr, row, col, out_row, out_col, col < N, x * scale)


def candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = grid_of({"BLOCK": (512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)})
    return [c for c in every if 8 <= c["BLOCK"] // (32 * c["num_warps"]) <= 64]


configurations = Configurations(__file__, "dropout", lambda sm, dtype, n: {"BLOCK": 2048, "num_warps": 4}, candidates)


def launchable(x: Tensor) -> bool:
    """Whether x lies in rows of one stride: then it is read where it lies."""
    return x.is_contiguous() or rows_of(x) is not None


def plan(x: Tensor, seed_in_memory: bool) -> Plan:
    """Of ``(x, out, seed tensor, seed, offset, last, scale)`` with out = ``torch.empty_like(x)``; without a seed in memory any
    tensor may stand for it."""
    flat = (1, x.numel(), 0, 1)
    (m, n, *x_strides), (_, _, *out_strides) = (flat, flat) if x.is_contiguous() else views(x, like(x))
    if x_strides[0] == n * x_strides[1] and out_strides == [n, 1]:  # rows that follow each other are one
        m, n, x_strides, out_strides = 1, m * n, [0, x_strides[1]], [0, 1]
    config = configurations(x.device, x.dtype, min(max(bucket(x.numel()), SMALL), LARGE))
    order = "flat" if m == 1 else "any" if n % GROUP else "rows"
    numbers = (0, 0)
    short = order == "any" or (order == "rows" and n < SHORT)
    if short and out_strides == [n, 1] and m * n < MOST_DIVIDED:
        order, numbers = "divided", (quotient(n) & 2**32 - 1, quotient(n) >> 32)
    block = min(config["BLOCK"], bucket(n if order == "rows" else m * n, 256))
    tile = {"BLOCK": block, "PER": 16 // x.element_size(), "ORDER": order, "SEED_IN_MEMORY": seed_in_memory}
    tile["TAIL"] = order in ("flat", "rows") and has_tail(x, n, (*x_strides, *out_strides))
    grid = (m * triton.cdiv(n, block) if order == "rows" else triton.cdiv(m * n, block),)
    return Plan(drop, grid, (m, n, *x_strides, *out_strides, *numbers), tile, config["num_warps"])
