"""Triton kernels for softmax(scale * x + mask) over rows [M, N], with a causal, a boolean or an additive mask.

Of a causal row only the columns that it keeps are read (rounded up to 16, so that accesses stay 16 bytes wide); the zeros
behind them are written. Masks are read in place, however they broadcast: a row's place in the mask comes from its index and
up to three strides.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import views
from weft.operators.configs import Configurations, bucket
from weft.operators.launch import Plan, Plans
from weft.operators.row_programs import ONE_PASS, candidates, heuristic
from weft.operators.softmax.kernels import exponential

LEVELS = 3  # of a mask's leading dimensions


@triton.jit
def kept(row, N, S, CAUSAL: tl.constexpr):
    """How many columns a row keeps: all, or those up to its own position, the last row's being the last column."""
    if CAUSAL:
        return tl.minimum(tl.maximum(row % S + 1 + N - S, 0), N)
    else:
        return tl.zeros_like(row) + N


@triton.jit
def sixteens(n):
    return (n + 15) // 16 * 16


@triton.jit
def mask_row(row, m1, m2, s0, s1, s2):
    """Where a row lies in the mask: its index in three digits, of bases m1 and m2, each times its stride."""
    return row // (m1 * m2) * s0 + row // m2 % m1 * s1 + row % m2 * s2


@triton.jit
def scores(x, at, col_stride, col, there, keeps, scale, MASK: tl.constexpr, CAUSAL: tl.constexpr):
    """scale * x + mask; -inf where there is no column."""
    x = x.to(tl.float32) * scale
    if MASK == 1:  # boolean: true is kept
        x += tl.where(tl.load(at + col * col_stride, mask=there, other=0) != 0, 0.0, -float("inf"))
    if MASK == 2:
        x += tl.load(at + col * col_stride, mask=there, other=0.0).to(tl.float32)
    if CAUSAL:
        there = there & (col < keeps)
    return tl.where(there, x, -float("inf"))


@triton.jit
def masked_softmax_rows(
    x_ptr, mask_ptr, y_ptr, M, N, S, x_row, x_col, y_row, y_col, m1, m2, s0, s1, s2, mask_col, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program holds ROWS whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    keeps = kept(row, N, S, CAUSAL)[:, None]
    there = inside & (col[None, :] < sixteens(keeps)) if CAUSAL else inside
    x_ptr += row[:, None] * x_row + col[None, :] * x_col
    x = tl.load(x_ptr, mask=there, other=0.0, eviction_policy="evict_last")
    at = mask_ptr + mask_row(row, m1, m2, s0, s1, s2)[:, None] if MASK else mask_ptr
    x = scores(x, at, mask_col, col[None, :], there, keeps, scale, MASK, CAUSAL)
    e = exponential(x - tl.max(x, axis=1)[:, None], ACCURATE)  # a row without any column is NaN, as in PyTorch
    y = e * tl.div_rn(1.0, tl.sum(e, axis=1))[:, None]
    tl.store(y_ptr + row[:, None] * y_row + col[None, :] * y_col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def masked_softmax_long_rows(
    x_ptr, mask_ptr, y_ptr, N, S, x_row, x_col, y_row, y_col, m1, m2, s0, s1, s2, mask_col, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ACCURATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for a row that does not fit: walked once for a running maximum and sum in each lane, once to write."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    keeps = kept(row, N, S, CAUSAL)
    readable = tl.minimum(sixteens(keeps), N)
    x_ptr += row * x_row
    at = mask_ptr + mask_row(row, m1, m2, s0, s1, s2) if MASK else mask_ptr
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, readable, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + c * x_col, mask=c < readable, other=0.0, eviction_policy="evict_last")
        x = scores(x, at, mask_col, c, c < readable, keeps, scale, MASK, CAUSAL)
        higher = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that has seen only -inf
        total = total * exponential(top - base, ACCURATE) + exponential(x - base, ACCURATE)
        top = higher
    best = tl.max(top, axis=0)
    factor = tl.div_rn(1.0, tl.sum(total * exponential(top - best, ACCURATE), axis=0))  # NaN when all are -inf
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + c * x_col, mask=c < readable, other=0.0, eviction_policy="evict_first")
        x = scores(x, at, mask_col, c, c < readable, keeps, scale, MASK, CAUSAL)
        y = exponential(x - best, ACCURATE) * factor
        tl.store(y_ptr + row * y_row + c * y_col, y.to(y_ptr.dtype.element_ty), mask=c < N)


@triton.jit
def masked_softmax_backward_rows(
    y_ptr, dy_ptr, dx_ptr, M, N, S, y_row, y_col, dy_row, dy_col, dx_row, dx_col, scale,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = scale * y * (dy - sum(y * dy)); what a causal mask hides is neither read nor given a gradient."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    keeps = kept(row, N, S, CAUSAL)[:, None]
    there = inside & (col[None, :] < sixteens(keeps)) if CAUSAL else inside
    y_ptr += row[:, None] * y_row + col[None, :] * y_col
    dy_ptr += row[:, None] * dy_row + col[None, :] * dy_col
    y = tl.load(y_ptr, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
    dy = tl.load(dy_ptr, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if CAUSAL:
        y = tl.where(col[None, :] < keeps, y, 0.0)
        dy = tl.where(col[None, :] < keeps, dy, 0.0)
    dx = scale * y * (dy - tl.sum(y * dy, axis=1)[:, None])
    if CAUSAL:
        dx = tl.where(col[None, :] < keeps, dx, 0.0)
    tl.store(dx_ptr + row[:, None] * dx_row + col[None, :] * dx_col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def masked_softmax_backward_long_rows(
    y_ptr, dy_ptr, dx_ptr, N, S, y_row, y_col, dy_row, dy_col, dx_row, dx_col, scale,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same, walking the row twice."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    keeps = kept(row, N, S, CAUSAL)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, keeps, BLOCK):
        c = (start + col).to(tl.int64)
        y = tl.load(y_ptr + row * y_row + c * y_col, mask=c < keeps, other=0.0, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + row * dy_row + c * dy_col, mask=c < keeps, other=0.0, eviction_policy="evict_last")
        dot += y.to(tl.float32) * dy.to(tl.float32)
    s = tl.sum(dot, axis=0)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        y = tl.load(y_ptr + row * y_row + c * y_col, mask=c < keeps, other=0.0, eviction_policy="evict_first")
        dy = tl.load(dy_ptr + row * dy_row + c * dy_col, mask=c < keeps, other=0.0, eviction_policy="evict_first")
        dx = scale * y.to(tl.float32) * (dy.to(tl.float32) - s)
        dx = tl.where(c < keeps, dx, 0.0)
        tl.store(dx_ptr + row * dx_row + c * dx_col, dx.to(dx_ptr.dtype.element_ty), mask=c < N)


# ---- plans -----------------------------------------------------------------------------------------------------------

forward_configuration = Configurations(__file__, "masked", heuristic, candidates)
backward_configuration = Configurations(__file__, "masked_backward", heuristic, candidates)
CAUSAL, NONE, BOOLEAN, ADDITIVE = "causal", "none", "boolean", "additive"  # kinds of masks


def levels(mask: Tensor) -> tuple[int, ...] | None:
    """A mask of x's shape (expanded) as ``(m1, m2, s0, s1, s2, column stride)``: leading dimensions merged wherever strides
    allow; None where more than three are left."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > LEVELS:
        return None
    (_, s0), (m1, s1), (m2, s2) = [*[(1, 0)] * (LEVELS - len(merged)), *merged]
    return m1, m2, s0, s1, s2, mask.stride(-1)


def forward_plan(x: Tensor, mask: Tensor, scale: float, kind: str) -> Plan:
    """Of ``(x, mask, y)``, y like x; mask is expanded to x's shape (x itself where there is none).

    Raises:
        Declined: strides for which a copy would be needed.
    """
    (m, n, *x_strides), (_, _, *y_strides) = views(x, torch.empty_like(x, device="meta"))
    found = levels(mask) if kind in (BOOLEAN, ADDITIVE) else (1, 1, 0, 0, 0, 0)
    if found is None:
        raise Declined("the mask's leading dimensions do not merge into three, so a copy would be needed")
    s = x.shape[-2] if kind == CAUSAL else 1
    scalars = (n, s, *x_strides, *y_strides, *found, float(scale))
    flags: dict[str, Any] = {
        "MASK": {BOOLEAN: 1, ADDITIVE: 2}.get(kind, 0),
        "CAUSAL": kind == CAUSAL,
        "ACCURATE": x.dtype == torch.float32,
    }
    config = forward_configuration(x.device, x.dtype, bucket(n))
    if n > ONE_PASS:
        tile = {"BLOCK": config["BLOCK"]}
        return Plan(masked_softmax_long_rows, (m,), scalars, {**flags, **tile}, config["num_warps"])
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n)}
    grid = (triton.cdiv(m, config["ROWS"]),)
    return Plan(masked_softmax_rows, grid, (m, *scalars), {**flags, **tile}, config["num_warps"])


def backward_plan(y: Tensor, dy: Tensor, scale: float, causal: bool) -> Plan:
    """Of ``(y, dy, dx)``, dx like y."""
    (m, n, *y_strides), (_, _, *dy_strides), (_, _, *dx_strides) = views(y, dy, torch.empty_like(y, device="meta"))
    s = y.shape[-2] if causal else 1
    scalars = (n, s, *y_strides, *dy_strides, *dx_strides, float(scale))
    config = backward_configuration(y.device, y.dtype, bucket(n))
    if n > ONE_PASS:
        tile = {"CAUSAL": causal, "BLOCK": config["BLOCK"]}
        return Plan(masked_softmax_backward_long_rows, (m,), scalars, tile, config["num_warps"])
    tile = {"CAUSAL": causal, "ROWS": config["ROWS"], "BLOCK": bucket(n)}
    grid = (triton.cdiv(m, config["ROWS"]),)
    return Plan(masked_softmax_backward_rows, grid, (m, *scalars), tile, config["num_warps"])


forward_plans = Plans(forward_plan)
backward_plans = Plans(backward_plan)
