"""Triton kernels for RMSNorm over rows [M, N], and the plans that pick their tiles.

Forward moves 2 tensors, backward 3 (x, dy, dx); the weight [N] stays in cache. Whole rows are kept in registers up to
``ONE_PASS`` columns. The weight's gradient is a sum over all rows: each persistent program adds up its rows in fp32
registers, writes one partial row, and a second kernel adds the partial rows in a fixed order, so it is deterministic.
Reads are marked ``evict_last``: the softmax folder's README.md says what that brings.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators import partial_sums
from weft.operators.call import views
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import Plan, Plans, multiprocessors
from weft.operators.row_programs import ONE_PASS, candidates, heuristic, row_tiles

ONE_PASS_BACKWARD = 8192  # backward holds x, dy and the weight's partial gradient


@triton.jit
def reciprocal_rms(squares, N, eps):
    """1 / sqrt(squares / N + eps), correctly rounded at each step: it is one number a row."""
    return tl.div_rn(1.0, tl.sqrt_rn((squares / N + eps).to(tl.float32)))  # torch.compile passes eps as a double


@triton.jit
def rms_rows(
    x_ptr, w_ptr, y_ptr, M, N, x_row, x_col, y_row, y_col, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """y[m, :] = x[m, :] / sqrt(mean(x[m, :]²) + eps) * w. One program holds ROWS whole rows, [ROWS, BLOCK], BLOCK >= N."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    x_ptr += row[:, None] * x_row + col[None, :] * x_col
    x = tl.load(x_ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    rstd = reciprocal_rms(tl.sum(x * x, axis=1), N, eps)
    y = x * rstd[:, None]
    if WEIGHTED:
        y *= tl.load(w_ptr + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None] * y_row + col[None, :] * y_col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_long_rows(x_ptr, w_ptr, y_ptr, N, x_row, x_col, y_row, y_col, eps, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    """The same for a row that does not fit: one program walks it twice, the second time from L2 where it fits."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + row * x_row + c * x_col, mask=c < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    rstd = reciprocal_rms(tl.sum(squares, axis=0), N, eps)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + row * x_row + c * x_col, mask=c < N, eviction_policy="evict_first").to(tl.float32)
        y = x * rstd
        if WEIGHTED:
            y *= tl.load(w_ptr + c, mask=c < N, eviction_policy="evict_last").to(tl.float32)
        tl.store(y_ptr + row * y_row + c * y_col, y.to(y_ptr.dtype.element_ty), mask=c < N)


@triton.jit
def rms_backward_rows(
    x_ptr, dy_ptr, w_ptr, dx_ptr, partial_ptr, M, N, x_row, x_col, dy_row, dy_col, dx_row, dx_col, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (w*dy - xhat * mean(w*dy * xhat)), xhat = x * rstd; partial[program, :] = sum over its rows of dy * xhat.

    A persistent grid: program p takes row blocks p, p + programs, … rstd is computed again, which costs no memory traffic.
    """
    col = tl.arange(0, BLOCK)
    in_row = col < N
    if WEIGHTED:
        w = tl.load(w_ptr + col, mask=in_row, other=0.0).to(tl.float32)[None, :]
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < M) & in_row[None, :]
        x = x_ptr + row[:, None] * x_row + col[None, :] * x_col
        dy = dy_ptr + row[:, None] * dy_row + col[None, :] * dy_col
        x = tl.load(x, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        rstd = reciprocal_rms(tl.sum(x * x, axis=1), N, eps)[:, None]
        xhat = x * rstd
        g = dy
        if WEIGHTED:
            dw += dy * xhat
            g = dy * w
        dx = rstd * (g - xhat * (tl.sum(g * xhat, axis=1) / N)[:, None])
        tl.store(dx_ptr + row[:, None] * dx_row + col[None, :] * dx_col, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        total = tl.sum(dw, axis=0)
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * N + col, total, mask=in_row)


@triton.jit
def rms_backward_statistics(
    x_ptr, dy_ptr, w_ptr, rstd_ptr, mean_ptr, N, x_row, x_col, dy_row, dy_col, eps,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """For one long row: rstd and mean(w*dy * xhat), both fp32 [M]."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    dots = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + row * x_row + c * x_col, mask=c < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        g = tl.load(dy_ptr + row * dy_row + c * dy_col, mask=c < N, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        if WEIGHTED:
            g *= tl.load(w_ptr + c, mask=c < N, other=0.0).to(tl.float32)
        squares += x * x
        dots += x * g
    rstd = reciprocal_rms(tl.sum(squares, axis=0), N, eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(mean_ptr + row, tl.sum(dots, axis=0) * rstd / N)


@triton.jit
def rms_backward_columns(
    x_ptr, dy_ptr, w_ptr, rstd_ptr, mean_ptr, dx_ptr, partial_ptr, M, N, x_row, x_col, dy_row, dy_col, dx_row, dx_col,
    STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Given the statistics: dx and the weight's partial gradient for STRIP rows of BLOCK columns; grid (columns, strips)."""
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    strip = tl.program_id(1).to(tl.int64)
    if WEIGHTED:
        w = tl.load(w_ptr + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, min(STRIP, M - tl.program_id(1) * STRIP), ROWS):
        row = strip * STRIP + start + tl.arange(0, ROWS)
        inside = (row[:, None] < M) & (c[None, :] < N)
        x = x_ptr + row[:, None] * x_row + c[None, :] * x_col
        g = dy_ptr + row[:, None] * dy_row + c[None, :] * dy_col
        x = tl.load(x, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        g = tl.load(g, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        xhat = x * rstd
        if WEIGHTED:
            dw += g * xhat
            g *= w
        dx = rstd * (g - xhat * tl.load(mean_ptr + row, mask=row < M, other=0.0)[:, None])
        tl.store(dx_ptr + row[:, None] * dx_row + c[None, :] * dx_col, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(partial_ptr + strip * N + c, tl.sum(dw, axis=0), mask=c < N)


# ---- plans -----------------------------------------------------------------------------------------------------------


def backward_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """PROGRAMS a multiprocessor; about 8 elements a thread, since three tensors and a partial sum are held."""
    if n > ONE_PASS_BACKWARD:
        return {"STRIP": 64, "ROWS": 4, "BLOCK": 1024, "num_warps": 8}
    rows = max(1, 2048 // n)
    return {"ROWS": rows, "PROGRAMS": 2, "num_warps": min(max(rows * n // 256, 4), 16)}


def backward_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n > ONE_PASS_BACKWARD:
        return grid_of({"STRIP": (32, 64, 128), "ROWS": (1, 2, 4, 8), "BLOCK": (512, 1024, 2048), "num_warps": (4, 8)})
    return row_tiles(n, {"PROGRAMS": (1, 2, 4, 8), "num_warps": (4, 8, 16)}, per_thread=(4, 32))


forward_configuration = Configurations(__file__, "forward", heuristic, candidates)
backward_configuration = Configurations(__file__, "backward", backward_heuristic, backward_candidates)


def forward_plan(x: Tensor, weight: Tensor, eps: float, weighted: bool) -> Plan:
    """Of ``(x, weight, y)`` with y = ``torch.empty_like(x)``; ``weight`` is contiguous, or any tensor if not weighted."""
    (m, n, *x_strides), (_, _, *y_strides) = views(x, torch.empty_like(x, device="meta"))
    config = forward_configuration(x.device, x.dtype, bucket(n))
    scalars = (n, *x_strides, *y_strides, eps)
    if n > ONE_PASS:
        tile = {"BLOCK": config["BLOCK"], "WEIGHTED": weighted}
        return Plan(rms_long_rows, (m,), scalars, tile, config["num_warps"])
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n), "WEIGHTED": weighted}
    return Plan(rms_rows, (triton.cdiv(m, config["ROWS"]),), (m, *scalars), tile, config["num_warps"])


class BackwardPlan:
    """The launches of the gradient: call with ``(x, dy, weight, dx, dw)``."""

    def __init__(self, x: Tensor, dy: Tensor, weight: Tensor, eps: float, weighted: bool):
        (m, n, *x_s), (_, _, *dy_s), (_, _, *dx_s) = views(x, dy, torch.empty_like(x, device="meta"))
        self.m, self.n, self.weighted = m, n, weighted
        config = backward_configuration(x.device, x.dtype, bucket(n))
        self.statistics: Plan | None = None
        if n <= ONE_PASS_BACKWARD:
            rows = config["ROWS"]
            self.programs = min(triton.cdiv(m, rows), multiprocessors(x.device) * config["PROGRAMS"])
            tile = {"ROWS": rows, "BLOCK": bucket(n), "WEIGHTED": weighted}
            scalars = (m, n, *x_s, *dy_s, *dx_s, eps)
            self.rows = Plan(rms_backward_rows, (self.programs,), scalars, tile, config["num_warps"])
        else:
            one = {"BLOCK": 8192, "WEIGHTED": weighted}
            self.statistics = Plan(rms_backward_statistics, (m,), (n, *x_s, *dy_s, eps), one, 16)
            strip = max(config["STRIP"], bucket(-(-m // 65535)))  # the grid's second dimension ends at 65535
            self.programs = triton.cdiv(m, strip)
            tile = {"STRIP": strip, "ROWS": config["ROWS"], "BLOCK": config["BLOCK"], "WEIGHTED": weighted}
            grid = (triton.cdiv(n, config["BLOCK"]), self.programs)
            self.rows = Plan(rms_backward_columns, grid, (m, n, *x_s, *dy_s, *dx_s), tile, config["num_warps"])
        self.total = partial_sums.plan(self.programs, n)

    def __call__(self, x: Tensor, dy: Tensor, weight: Tensor, dx: Tensor, dw: Tensor) -> None:
        # [programs, N] fp32
        partial = torch.empty((self.programs, self.n) if self.weighted else (1,), dtype=torch.float32, device=x.device)
        if self.statistics is None:
            self.rows(x, dy, weight, dx, partial)
        else:
            rstd, mean = torch.empty((2, self.m), dtype=torch.float32, device=x.device).unbind(0)
            self.statistics(x, dy, weight, rstd, mean)
            self.rows(x, dy, weight, rstd, mean, dx, partial)
        if self.weighted:
            self.total(partial, dw)


forward_plans = Plans(forward_plan)
backward_plans = Plans(BackwardPlan)
