"""Triton kernels for softmax over rows [M, N], and the plans that pick their tiles.

Forward moves 2 tensors, backward 3 (y, dy, dx); a row is kept in registers, so each is read once up to ``ONE_PASS``
columns. Longer rows are read twice by the portable kernel, the second time from L2 where they fit; ``cluster.cu`` keeps
them on chip instead. Reads are marked ``evict_last``: README.md says what that brings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.call import views
from weft.operators.configs import Configurations, bucket
from weft.operators.launch import Plan, Plans
from weft.operators.row_programs import ONE_PASS, candidates, heuristic


@triton.jit
def exponential(t, ACCURATE: tl.constexpr):
    """exp(t) for t <= 0. ``tl.exp`` multiplies by log2(e) and takes ``ex2``: the product's rounding alone costs |t|/2 ulp.
    ACCURATE splits the product into integer and fraction with a compensation term, for fp32 results as exact as PyTorch's."""
    if ACCURATE:
        hi = t * 1.4426950408889634
        lo = tl.fma(t, 1.4426950216293335, -hi) + t * 1.9259629911266174e-8  # log2(e) as a sum of two floats
        whole = tl.floor(hi + 0.5)
        scaled = tl.exp2(tl.where(whole < -200.0, -200.0, whole)) * tl.exp2((hi - whole) + lo)
        return tl.where(t < -150.0, 0.0, scaled)
    else:
        return tl.exp(t)


@triton.jit
def softmax_rows(
    x_ptr, y_ptr, M, N, x_row, x_col, y_row, y_col, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACCURATE: tl.constexpr
):
    """y[m, :] = exp(x[m, :] - max) / sum. One program holds ROWS whole rows, [ROWS, BLOCK] with BLOCK >= N."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: row * stride may pass 2**31
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    x_ptr += row[:, None] * x_row + col[None, :] * x_col
    x = tl.load(x_ptr, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
    e = exponential(x - tl.max(x, axis=1)[:, None], ACCURATE)  # an all -inf row gives NaN, as in PyTorch
    y = e * tl.div_rn(1.0, tl.sum(e, axis=1))[:, None]  # one exact division a row
    tl.store(y_ptr + row[:, None] * y_row + col[None, :] * y_col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_long_rows(x_ptr, y_ptr, N, x_row, x_col, y_row, y_col, BLOCK: tl.constexpr, ACCURATE: tl.constexpr):
    """The same for a row that does not fit: one program walks it twice, first for a running maximum and sum in each
    lane (online softmax, Milakov & Gimelshein 2018), then to write."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + row * x_row + c * x_col, mask=c < N, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        higher = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that has seen only -inf
        total = total * exponential(top - base, ACCURATE) + exponential(x - base, ACCURATE)
        top = higher
    best = tl.max(top, axis=0)
    scale = tl.div_rn(1.0, tl.sum(total * exponential(top - best, ACCURATE), axis=0))  # NaN when all are -inf
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + row * x_row + c * x_col, mask=c < N, eviction_policy="evict_first").to(tl.float32)
        y = exponential(x - best, ACCURATE) * scale
        tl.store(y_ptr + row * y_row + c * y_col, y.to(y_ptr.dtype.element_ty), mask=c < N)


@triton.jit
def softmax_backward_rows(
    y_ptr, dy_ptr, dx_ptr, M, N, y_row, y_col, dy_row, dy_col, dx_row, dx_col, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """dx = y * (dy - sum(y * dy)), whole rows in registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    y_ptr += row[:, None] * y_row + col[None, :] * y_col
    dy_ptr += row[:, None] * dy_row + col[None, :] * dy_col
    y = tl.load(y_ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    dy = tl.load(dy_ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
    tl.store(dx_ptr + row[:, None] * dx_row + col[None, :] * dx_col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_long_rows(
    y_ptr, dy_ptr, dx_ptr, N, y_row, y_col, dy_row, dy_col, dx_row, dx_col, BLOCK: tl.constexpr
):
    """The same, walking the row twice."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        y = tl.load(y_ptr + row * y_row + c * y_col, mask=c < N, other=0.0, eviction_policy="evict_last")
        dy = tl.load(dy_ptr + row * dy_row + c * dy_col, mask=c < N, other=0.0, eviction_policy="evict_last")
        dot += y.to(tl.float32) * dy.to(tl.float32)
    s = tl.sum(dot, axis=0)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        y = tl.load(y_ptr + row * y_row + c * y_col, mask=c < N, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row + c * dy_col, mask=c < N, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx_ptr + row * dx_row + c * dx_col, (y * (dy - s)).to(dx_ptr.dtype.element_ty), mask=c < N)


# ---- plans -----------------------------------------------------------------------------------------------------------


forward_configuration = Configurations(__file__, "forward", heuristic, candidates)
backward_configuration = Configurations(__file__, "backward", heuristic, candidates)


def forward_plan(x: Tensor, dim: int) -> Plan:
    """Softmax of x over ``dim`` into ``torch.empty_like(x)``."""
    (m, n, *x_strides), (_, _, *y_strides) = views(
        x.movedim(dim, -1), torch.empty_like(x, device="meta").movedim(dim, -1)
    )
    accurate = {"ACCURATE": x.dtype == torch.float32}
    config = forward_configuration(x.device, x.dtype, bucket(n))
    if n > ONE_PASS:
        return Plan(
            softmax_long_rows,
            (m,),
            (n, *x_strides, *y_strides),
            {"BLOCK": config["BLOCK"], **accurate},
            config["num_warps"],
        )
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n), **accurate}
    grid = (triton.cdiv(m, config["ROWS"]),)
    return Plan(softmax_rows, grid, (m, n, *x_strides, *y_strides), tile, config["num_warps"])


def backward_plan(y: Tensor, dy: Tensor, dim: int) -> Plan:
    """Gradient of softmax over ``dim``, into ``torch.empty_like(y)``."""
    (m, n, *y_strides), (_, _, *dy_strides), (_, _, *dx_strides) = views(
        *(t.movedim(dim, -1) for t in (y, dy, torch.empty_like(y, device="meta")))
    )
    scalars = (n, *y_strides, *dy_strides, *dx_strides)
    config = backward_configuration(y.device, y.dtype, bucket(n))
    if n > ONE_PASS:
        return Plan(softmax_backward_long_rows, (m,), scalars, {"BLOCK": config["BLOCK"]}, config["num_warps"])
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n)}
    return Plan(softmax_backward_rows, (triton.cdiv(m, config["ROWS"]),), (m, *scalars), tile, config["num_warps"])


forward_plans = Plans(forward_plan)
backward_plans = Plans(backward_plan)
