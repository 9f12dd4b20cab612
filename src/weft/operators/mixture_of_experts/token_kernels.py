"""Triton kernels that bring experts' rows back to their tokens: a weighted sum of gathered rows, and its gradient.

Shapes: T tokens, K experts of each, R = T·K rows of D columns. A row is read and written once, in whole vectors; sums are
in fp32 in the order of the slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import Plan, Plans


@triton.jit
def combine(
    y_ptr, position_ptr, weights_ptr, out_ptr, T, R, D, K, y_row, y_col, position_row, position_col, weights_row, weights_col,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """out[t, :] = Σ_j weights[t, j] · y[position[t, j], :]; NaN for a position out of range, which is never read."""
    blocks = tl.cdiv(D, BLOCK)
    t = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.range(0, K, loop_unroll_factor=4):  # several rows on their way
        row = tl.load(position_ptr + t * position_row + j * position_col, mask=t < T, other=0).to(tl.int64)
        known = (row >= 0) & (row < R)
        inside = (known & (t < T))[:, None] & (col[None, :] < D)
        y = tl.load(y_ptr + row[:, None] * y_row + col[None, :] * y_col, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + t * weights_row + j * weights_col, mask=t < T, other=0.0).to(tl.float32)
            y *= weight[:, None]
        total += tl.where(known[:, None], y, float("nan"))
    inside = (t[:, None] < T) & (col[None, :] < D)
    tl.store(out_ptr + t[:, None] * D + col[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine_gradient(
    y_ptr, position_ptr, weights_ptr, dout_ptr, dy_ptr, dweights_ptr, R, D, K,
    y_row, y_col, position_row, position_col, weights_row, weights_col, dout_row, dout_col,
    BLOCK: tl.constexpr, DOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of token t and each slot j: dy[position, :] = weight · dout[t, :] (ROWS), dweights[t, j] = dout[t, :] · y[position,
    :] (DOTS)."""
    t = tl.program_id(0).to(tl.int64)
    for j in range(0, K):
        row = tl.load(position_ptr + t * position_row + j * position_col).to(tl.int64)
        known = (row >= 0) & (row < R)
        weight = tl.load(weights_ptr + t * weights_row + j * weights_col).to(tl.float32)
        dot = tl.zeros([BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            col = start + tl.arange(0, BLOCK).to(tl.int64)
            d = tl.load(dout_ptr + t * dout_row + col * dout_col, mask=col < D, other=0.0).to(tl.float32)
            inside = known & (col < D)
            if DOTS:
                dot += d * tl.load(y_ptr + row * y_row + col * y_col, mask=inside, other=0.0).to(tl.float32)
            if ROWS:
                tl.store(dy_ptr + row * D + col, (d * weight).to(dy_ptr.dtype.element_ty), mask=inside)
        if DOTS:
            tl.store(dweights_ptr + t * K + j, tl.sum(dot, 0).to(dweights_ptr.dtype.element_ty))


# ---- plans -----------------------------------------------------------------------------------------------------------


def heuristic(sm: int, dtype: torch.dtype, d: int) -> Config:
    """Sums in fp32, 8 a thread: four rows on their way to each."""
    block = min(d, 1024)
    return {"ROWS": max(1, min(1024 // block, 16)), "BLOCK": block, "num_warps": 4}


def candidates(sm: int, dtype: torch.dtype, d: int) -> Any:
    blocks = [b for b in (256, 512, 1024, 2048, 4096) if b <= d] or [d]
    for c in grid_of({"ROWS": (1, 2, 4, 8), "BLOCK": blocks, "num_warps": (2, 4, 8)}):
        if 4 <= c["ROWS"] * c["BLOCK"] // (32 * c["num_warps"]) <= 32:
            yield c


configuration = Configurations(__file__, "combine", heuristic, candidates)


def _combine(y: Tensor, position: Tensor, *weights: Tensor) -> Plan:
    """Of ``(y, position, weights, out)``, out contiguous; without weights any tensor stands in for them."""
    (r, d), (t, k) = y.shape, position.shape
    config = configuration(y.device, y.dtype, bucket(d))
    tile = {"ROWS": config["ROWS"], "BLOCK": min(config["BLOCK"], bucket(d))}
    grid = (triton.cdiv(t, tile["ROWS"]) * triton.cdiv(d, tile["BLOCK"]),)
    strides = (*y.stride(), *position.stride(), *(weights[0].stride() if weights else (0, 0)))
    return Plan(combine, grid, (t, r, d, k, *strides), {**tile, "WEIGHTED": bool(weights)}, config["num_warps"])


def _gradient(y: Tensor, position: Tensor, weights: Tensor, dout: Tensor, rows: bool, dots: bool) -> Plan:
    """Of ``(y, position, weights, dout, dy, dweights)``, the last two contiguous; dout stands in for one that is not
    wanted."""
    (r, d), (t, k) = y.shape, position.shape
    strides = (*y.stride(), *position.stride(), *weights.stride(), *dout.stride())
    block = min(bucket(d), 4096)
    constants = {"BLOCK": block, "DOTS": dots, "ROWS": rows}
    return Plan(combine_gradient, (t,), (r, d, k, *strides), constants, 8 if block > 2048 else 4)


plans = Plans(_combine)
gradient_plans = Plans(_gradient)
