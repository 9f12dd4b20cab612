"""Triton kernels for log-softmax over rows [M, N], and the plans that pick their tiles.

As softmax's (kernels.py): forward moves 2 tensors, backward 3 (y, dy, dx); rows of up to ``ONE_PASS`` columns are kept in
registers, longer ones are walked twice.
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
from weft.operators.softmax.kernels import exponential


@triton.jit
def log_softmax_rows(
    x_ptr, y_ptr, M, N, x_row, x_col, y_row, y_col, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACCURATE: tl.constexpr
):
    """y[m, :] = x - max - log(sum(exp(x - max))). One program holds ROWS whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    x_ptr += row[:, None] * x_row + col[None, :] * x_col
    x = tl.load(x_ptr, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
    x -= tl.max(x, axis=1)[:, None]  # an all -inf row gives NaN, as in PyTorch
    y = x - tl.log(tl.sum(exponential(x, ACCURATE), axis=1))[:, None]
    tl.store(y_ptr + row[:, None] * y_row + col[None, :] * y_col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def log_softmax_long_rows(x_ptr, y_ptr, N, x_row, x_col, y_row, y_col, BLOCK: tl.constexpr, ACCURATE: tl.constexpr):
    """The same for a row that does not fit: walked once for a running maximum and sum in each lane, once to write."""
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
    log_total = tl.log(tl.sum(total * exponential(top - best, ACCURATE), axis=0))  # NaN when all are -inf
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + row * x_row + c * x_col, mask=c < N, eviction_policy="evict_first").to(tl.float32)
        y = (x - best) - log_total
        tl.store(y_ptr + row * y_row + c * y_col, y.to(y_ptr.dtype.element_ty), mask=c < N)


@triton.jit
def log_softmax_backward_rows(
    y_ptr, dy_ptr, dx_ptr, M, N, y_row, y_col, dy_row, dy_col, dx_row, dx_col,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """dx = dy - exp(y) * sum(dy), whole rows in registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    y_ptr += row[:, None] * y_row + col[None, :] * y_col
    dy_ptr += row[:, None] * dy_row + col[None, :] * dy_col
    y = tl.load(y_ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    dy = tl.load(dy_ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    dx = dy - exponential(y, ACCURATE) * tl.sum(dy, axis=1)[:, None]
    tl.store(dx_ptr + row[:, None] * dx_row + col[None, :] * dx_col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def log_softmax_backward_long_rows(
    y_ptr, dy_ptr, dx_ptr, N, y_row, y_col, dy_row, dy_col, dx_row, dx_col, BLOCK: tl.constexpr, ACCURATE: tl.constexpr
):
    """The same: dy is walked for its sum, then once more beside y."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        dy = tl.load(dy_ptr + row * dy_row + c * dy_col, mask=c < N, other=0.0, eviction_policy="evict_last")
        total += dy.to(tl.float32)
    s = tl.sum(total, axis=0)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        y = tl.load(y_ptr + row * y_row + c * y_col, mask=c < N, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row + c * dy_col, mask=c < N, eviction_policy="evict_first").to(tl.float32)
        dx = dy - exponential(y, ACCURATE) * s
        tl.store(dx_ptr + row * dx_row + c * dx_col, dx.to(dx_ptr.dtype.element_ty), mask=c < N)


# ---- plans -----------------------------------------------------------------------------------------------------------

forward_configuration = Configurations(__file__, "log_softmax", heuristic, candidates)
backward_configuration = Configurations(__file__, "log_softmax_backward", heuristic, candidates)


def _plan(configuration: Configurations, whole: object, long: object, dim: int, *tensors: Tensor) -> Plan:
    """Of kernels over rows of ``dim``: ``whole`` holds them, ``long`` walks them."""
    found = views(*(t.movedim(dim, -1) for t in tensors))
    (m, n, *_), strides = found[0], [s for view in found for s in view[2:]]
    accurate = {"ACCURATE": tensors[0].dtype == torch.float32}
    config = configuration(tensors[0].device, tensors[0].dtype, bucket(n))
    if n > ONE_PASS:
        return Plan(long, (m,), (n, *strides), {"BLOCK": config["BLOCK"], **accurate}, config["num_warps"])
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n), **accurate}
    return Plan(whole, (triton.cdiv(m, config["ROWS"]),), (m, n, *strides), tile, config["num_warps"])


def forward_plan(x: Tensor, dim: int) -> Plan:
    """Log-softmax of x over ``dim`` into ``torch.empty_like(x)``."""
    y = torch.empty_like(x, device="meta")
    return _plan(forward_configuration, log_softmax_rows, log_softmax_long_rows, dim, x, y)


def backward_plan(y: Tensor, dy: Tensor, dim: int) -> Plan:
    """Gradient of log-softmax over ``dim``, into ``torch.empty_like(y)``."""
    dx = torch.empty_like(y, device="meta")
    kernels = log_softmax_backward_rows, log_softmax_backward_long_rows
    return _plan(backward_configuration, *kernels, dim, y, dy, dx)


forward_plans = Plans(forward_plan)
backward_plans = Plans(backward_plan)
