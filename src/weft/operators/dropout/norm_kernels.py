"""Kernels of dropout + residual + RMSNorm over rows [M, N], and their plans.

Forward reads x and the residual and writes y and h; backward reads h, dy and dh and writes the gradients of residual and x.
Whole rows stay in registers: forward to ``row_programs.ONE_PASS`` columns, backward to ``ONE_PASS_BACKWARD``; longer rows are
walked twice there. The weight's gradient is added up in fp32 in a fixed order: partial rows first, then ``partial_sums``.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators import partial_sums
from weft.operators.configs import Configurations, bucket, grid_of
from weft.operators.dropout.philox import dropped
from weft.operators.launch import Plan, multiprocessors
from weft.operators.layout import views
from weft.operators.normalization.kernels import ONE_PASS_BACKWARD, backward_heuristic
from weft.operators.row_programs import candidates, heuristic, row_tiles

LEAST_BLOCK = 8  # a group of elements with one random number


@triton.jit
def parts_of(row, start, N, BLOCK: tl.constexpr, PER: tl.constexpr):
    """The numbers of the parts, [ROWS, BLOCK // PER], that BLOCK columns from ``start`` on of these rows are cut into."""
    return ((row[:, None] * N + start) // PER + tl.arange(0, BLOCK // PER)[None, :]).to(tl.uint64)


@triton.jit
def read_rows(ptr, row, col, row_stride, col_stride, inside):
    at = ptr + row[:, None] * row_stride + col[None, :] * col_stride
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def write_rows(ptr, row, col, N, inside, value):
    tl.store(ptr + row[:, None] * N + col[None, :], value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed_ptr", "seed", "offset", "last", "scale"])
def forward_rows(
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr,
    seed_ptr, seed: tl.uint64, offset: tl.uint64, last: tl.uint32, scale: tl.float32,
    M, N, x_row, x_col, r_row, r_col, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr, SEED_IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """h = residual + dropout(x), rounded; y = h / sqrt(mean(h²) + eps) * w. y and h are contiguous, BLOCK >= N."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    x = read_rows(x_ptr, row, col, x_row, x_col, inside)
    residual = read_rows(residual_ptr, row, col, r_row, r_col, inside)
    x = dropped(x, parts_of(row, 0, N, BLOCK, PER), seed, offset, last, PER)
    h = (residual + x * scale).to(h_ptr.dtype.element_ty)
    write_rows(h_ptr, row, col, N, inside, h)
    h = h.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + eps)[:, None]
    w = tl.load(w_ptr + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(tl.float32)[None, :]
    write_rows(y_ptr, row, col, N, inside, h * rstd * w)


@triton.jit(do_not_specialize=["seed_ptr", "seed", "offset", "last", "scale"])
def backward_rows(
    h_ptr, dy_ptr, dh_ptr, w_ptr, dr_ptr, dx_ptr, partial_ptr,
    seed_ptr, seed: tl.uint64, offset: tl.uint64, last: tl.uint32, scale: tl.float32,
    M, N, dy_row, dy_col, dh_row, dh_col, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr, SEED_IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """dr = dh + rstd * (w*dy - xhat * mean(w*dy * xhat)), xhat = h * rstd; dx = dropout(dr); partial[program, :] = sum over its
    rows of dy * xhat. A persistent grid: program p takes row blocks p, p + programs, …"""
    col = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < M) & (col[None, :] < N)
        h = read_rows(h_ptr, row, col, N, 1, inside)
        dy = read_rows(dy_ptr, row, col, dy_row, dy_col, inside)
        dh = read_rows(dh_ptr, row, col, dh_row, dh_col, inside)
        rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + eps)[:, None]
        xhat, g = h * rstd, dy * w
        dw += dy * xhat
        dr = dh + rstd * (g - xhat * (tl.sum(g * xhat, axis=1) / N)[:, None])
        write_rows(dr_ptr, row, col, N, inside, dr)
        dx = dropped(dr, parts_of(row, 0, N, BLOCK, PER), seed, offset, last, PER) * scale
        write_rows(dx_ptr, row, col, N, inside, dx)
    tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * N + col, tl.sum(dw, axis=0), mask=col < N)


@triton.jit
def backward_statistics(
    h_ptr, dy_ptr, w_ptr, rstd_ptr, mean_ptr, N, dy_row, dy_col, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one long row: rstd and mean(w*dy * xhat), both fp32 [M]."""
    row = tl.program_id(0).to(tl.int64)
    squares, dots = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = (start + tl.arange(0, BLOCK)).to(tl.int64)
        h = tl.load(h_ptr + row * N + c, mask=c < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
        g = tl.load(dy_ptr + row * dy_row + c * dy_col, mask=c < N, other=0.0, eviction_policy="evict_last")
        w = tl.load(w_ptr + c, mask=c < N, other=0.0).to(tl.float32)
        squares += h * h
        dots += h * g.to(tl.float32) * w
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    tl.store(mean_ptr + row, tl.sum(dots, axis=0) * rstd / N)


@triton.jit(do_not_specialize=["seed_ptr", "seed", "offset", "last", "scale"])
def backward_columns(
    h_ptr, dy_ptr, dh_ptr, w_ptr, rstd_ptr, mean_ptr, dr_ptr, dx_ptr, partial_ptr,
    seed_ptr, seed: tl.uint64, offset: tl.uint64, last: tl.uint32, scale: tl.float32,
    M, N, dy_row, dy_col, dh_row, dh_col,
    STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr, SEED_IN_MEMORY: tl.constexpr,
):  # fmt: skip
    """Given the statistics: what :func:`backward_rows` gives, of STRIP rows of BLOCK columns; grid (columns, strips)."""
    first, strip = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1).to(tl.int64)
    col = first + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    for start in range(0, min(STRIP, M - tl.program_id(1) * STRIP), ROWS):
        row = strip * STRIP + start + tl.arange(0, ROWS)
        inside = (row[:, None] < M) & (col[None, :] < N)
        h = read_rows(h_ptr, row, col, N, 1, inside)
        dy = read_rows(dy_ptr, row, col, dy_row, dy_col, inside)
        dh = read_rows(dh_ptr, row, col, dh_row, dh_col, inside)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)[:, None]
        xhat = h * rstd
        dw += dy * xhat
        dr = dh + rstd * (dy * w - xhat * mean)
        write_rows(dr_ptr, row, col, N, inside, dr)
        dx = dropped(dr, parts_of(row, first, N, BLOCK, PER), seed, offset, last, PER) * scale
        write_rows(dx_ptr, row, col, N, inside, dx)
    tl.store(partial_ptr + strip * N + col, tl.sum(dw, axis=0), mask=col < N)


def backward_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n > ONE_PASS_BACKWARD:
        return grid_of({"STRIP": (32, 64, 128), "ROWS": (1, 2, 4), "BLOCK": (512, 1024, 2048), "num_warps": (4, 8)})
    return row_tiles(n, {"PROGRAMS": (1, 2, 4, 8), "num_warps": (4, 8, 16)}, per_thread=(4, 16))


forward_configuration = Configurations(__file__, "norm_forward", heuristic, candidates)
backward_configuration = Configurations(__file__, "norm_backward", backward_heuristic, backward_candidates)


def _random(c: Any) -> dict[str, Any]:
    return {"PER": 16 // c.x.element_size(), "SEED_IN_MEMORY": c.in_memory}


def forward_plan(c: Any) -> Plan:
    """Of an ``AddNormCall`` (dispatch.py)."""
    (m, n, *x_s), (_, _, *residual_s) = views(c.x, c.residual)
    config = forward_configuration(c.x.device, c.x.dtype, bucket(n))
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n, LEAST_BLOCK), **_random(c)}
    scalars = (m, n, *x_s, *residual_s, c.eps)
    return Plan(forward_rows, (triton.cdiv(m, config["ROWS"]),), scalars, tile, config["num_warps"])


class GradientPlan:
    """The launches of the gradient: call with ``(h, dy, dh, weight, dr, dx, dw, *seed, offset and so on)``."""

    def __init__(self, m: int, n: int, rows: Callable[..., None], parts: int, statistics: Plan | None = None):
        self.m, self.n, self.rows, self.parts, self.statistics = m, n, rows, parts, statistics
        self.total = partial_sums.plan(parts, n)

    def __call__(
        self, h: Tensor, dy: Tensor, dh: Tensor, weight: Tensor, dr: Tensor, dx: Tensor, dw: Tensor, *mask: Any
    ) -> None:
        partial = torch.empty((self.parts, self.n), dtype=torch.float32, device=h.device)
        statistics: tuple[Tensor, ...] = ()
        if self.statistics is not None:
            statistics = torch.empty((2, self.m), dtype=torch.float32, device=h.device).unbind(0)
            self.statistics(h, dy, weight, *statistics)
        self.rows(h, dy, dh, weight, *statistics, dr, dx, partial, *mask)
        self.total(partial, dw)


def gradient_rows(c: Any) -> GradientPlan:
    """Of a ``GradientCall`` (dispatch.py)."""
    (m, n, *_), (_, _, *dy_strides), (_, _, *dh_strides) = views(c.h, c.dy, c.dh)
    config = backward_configuration(c.h.device, c.h.dtype, bucket(n))
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n, LEAST_BLOCK), **_random(c)}
    parts = min(triton.cdiv(m, config["ROWS"]), multiprocessors(c.h.device) * config["PROGRAMS"])
    scalars = (m, n, *dy_strides, *dh_strides, c.eps)
    return GradientPlan(m, n, Plan(backward_rows, (parts,), scalars, tile, config["num_warps"]), parts)


def gradient_columns(c: Any) -> GradientPlan:
    (m, n, *_), (_, _, *dy_strides), (_, _, *dh_strides) = views(c.h, c.dy, c.dh)
    config = backward_configuration(c.h.device, c.h.dtype, bucket(n))
    statistics = Plan(backward_statistics, (m,), (n, *dy_strides, c.eps), {"BLOCK": 8192}, 16)
    strip = max(config["STRIP"], bucket(-(-m // 65535)))  # the grid's second dimension ends at 65535
    parts = triton.cdiv(m, strip)
    tile = {"STRIP": strip, "ROWS": config["ROWS"], "BLOCK": config["BLOCK"], **_random(c)}
    grid, scalars = (triton.cdiv(n, config["BLOCK"]), parts), (m, n, *dy_strides, *dh_strides)
    return GradientPlan(m, n, Plan(backward_columns, grid, scalars, tile, config["num_warps"]), parts, statistics)
