"""Kernels of dropout + residual + RMSNorm over rows [M, N], and their plans.

Forward reads x and the residual and writes y and h; backward reads h, dy and dh and writes the gradients of residual and x.
Whole rows stay in registers: forward to ``row_programs.ONE_PASS`` columns, backward to ``ONE_PASS_BACKWARD``; longer rows are
walked twice. Forward takes rows of any length, in shifted tiles (``shifted.py``), backward those of whole groups of random
numbers. The weight's gradient is added up in fp32 in a fixed order: partial rows first, then ``partial_sums``.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators import partial_sums
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.dropout.philox import dropped
from weft.operators.dropout.shifted import lie_alike, read_tile, rows_of, shift_of, takes_last, write_tile
from weft.operators.launch import Plan, multiprocessors
from weft.operators.layout import views
from weft.operators.normalization.kernels import ONE_PASS_BACKWARD, backward_heuristic, guarded
from weft.operators.row_programs import candidates, heuristic, in_pieces, lie_apart, row_tiles, side_by_side

LEAST_BLOCK = 8  # a group of elements with one random number
SHIFTED_WHOLE = 8192  # columns of the longest rows of which shifted tiles hold a whole one


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


@triton.jit
def read_weight(ptr, col, N, shift):
    inside = (col >= shift) & (col < N + shift)
    return tl.load(ptr + col - shift, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["seed_ptr", "seed", "offset", "last", "scale"])
def forward_rows(
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr,
    seed_ptr, seed: tl.uint64, offset: tl.uint64, last: tl.uint32, scale: tl.float32,
    M, N, x_row, x_col, r_row, r_col, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PERIOD: tl.constexpr, PER: tl.constexpr, SEED_IN_MEMORY: tl.constexpr,
    X_ALIKE: tl.constexpr, R_ALIKE: tl.constexpr,
):  # fmt: skip
    """h = residual + dropout(x), rounded; y = h / sqrt(mean(h²) + eps) * w. y and h are contiguous, BLOCK >= N."""
    row, shift = rows_of(tl.program_id(0), ROWS, PERIOD), shift_of(tl.program_id(0), N, PERIOD)
    last_row = takes_last(tl.program_id(0), M, ROWS, PERIOD)
    col = tl.arange(0, BLOCK)
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    x = read_tile(x_ptr, row, x_row, x_col, col, M, N, shift, last_row, PERIOD, X_ALIKE)
    residual = read_tile(residual_ptr, row, r_row, r_col, col, M, N, shift, last_row, PERIOD, R_ALIKE)
    x = dropped(x, parts_of(row, 0, N, BLOCK, PER), seed, offset, last, PER)
    h = (residual + x * scale).to(h_ptr.dtype.element_ty)
    write_tile(h_ptr, row, col, M, N, shift, h, PERIOD)
    h = h.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + eps)[:, None]
    write_tile(y_ptr, row, col, M, N, shift, h * rstd * read_weight(w_ptr, col, N, shift), PERIOD)


@triton.jit(do_not_specialize=["seed_ptr", "seed", "offset", "last", "scale"])
def forward_long_rows(
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr,
    seed_ptr, seed: tl.uint64, offset: tl.uint64, last: tl.uint32, scale: tl.float32,
    M, N, x_row, x_col, r_row, r_col, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PERIOD: tl.constexpr, PER: tl.constexpr, SEED_IN_MEMORY: tl.constexpr,
    X_ALIKE: tl.constexpr, R_ALIKE: tl.constexpr,
):  # fmt: skip
    """The same for rows that do not fit: a program walks them twice."""
    row, shift = rows_of(tl.program_id(0), ROWS, PERIOD), shift_of(tl.program_id(0), N, PERIOD)
    last_row = takes_last(tl.program_id(0), M, ROWS, PERIOD)
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, N + shift, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = read_tile(x_ptr, row, x_row, x_col, col, M, N, shift, last_row, PERIOD, X_ALIKE)
        residual = read_tile(residual_ptr, row, r_row, r_col, col, M, N, shift, last_row, PERIOD, R_ALIKE)
        x = dropped(x, parts_of(row, start, N, BLOCK, PER), seed, offset, last, PER)
        h = (residual + x * scale).to(h_ptr.dtype.element_ty)
        write_tile(h_ptr, row, col, M, N, shift, h, PERIOD)
        squares += h.to(tl.float32) * h.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]
    tl.debug_barrier()  # what was written is read again; another thread may have written it
    for start in range(0, N + shift, BLOCK):
        col = start + tl.arange(0, BLOCK)
        h = read_tile(h_ptr, row, N, 1, col, M, N, shift, last_row, PERIOD, True)
        write_tile(y_ptr, row, col, M, N, shift, h * rstd * read_weight(w_ptr, col, N, shift), PERIOD)


@triton.jit(do_not_specialize=["seed_ptr", "seed", "offset", "last", "scale"])
def backward_rows(
    h_ptr, dy_ptr, dh_ptr, w_ptr, dr_ptr, dx_ptr, partial_ptr,
    seed_ptr, seed: tl.uint64, offset: tl.uint64, last: tl.uint32, scale: tl.float32,
    M, N, dy_row, dy_col, dh_row, dh_col, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr, SEED_IN_MEMORY: tl.constexpr, GUARDED: tl.constexpr,
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
        if GUARDED:
            rstd = tl.where((row < M)[:, None], rstd, 0.0)
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


def gradient_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Of short rows as many programs of one warp as 128 registers a thread allow: none waits for another warp's sums."""
    if n > 256:
        return backward_heuristic(sm, dtype, n)
    return {"ROWS": 512 // max(n, LEAST_BLOCK), "PROGRAMS": 16, "num_warps": 1}


forward_configuration = Configurations(__file__, "norm_forward", heuristic, candidates)
backward_configuration = Configurations(__file__, "norm_backward", gradient_heuristic, backward_candidates)


def _random(c: Any) -> dict[str, Any]:
    return {"PER": 16 // c.x.element_size(), "SEED_IN_MEMORY": c.in_memory}


def forward_plan(c: Any) -> Plan:
    """Of an ``AddNormCall`` (dispatch.py)."""
    (m, n, *x_s), (_, _, *residual_s) = views(c.x, c.residual)
    config, random = forward_configuration(c.x.device, c.x.dtype, bucket(n)), _random(c)
    period = random["PER"] if n % random["PER"] else 1
    if lie_apart((*x_s, *residual_s)):
        config = side_by_side(c.x, m, n)
    elif period > 1 and n > SHIFTED_WHOLE:
        config = {"BLOCK": 4096, "num_warps": 16}
    rows, block = config.get("ROWS", 1), config.get("BLOCK", bucket(n + period - 1, LEAST_BLOCK))
    h = torch.empty(c.x.shape, dtype=c.x.dtype, device="meta")
    alike = {"X_ALIKE": lie_alike(h, c.x), "R_ALIKE": lie_alike(h, c.residual)}
    programs = triton.cdiv(m, rows * period) * period
    kernel = forward_long_rows if "BLOCK" in config else forward_rows
    tile = {"ROWS": rows, "BLOCK": block, "PERIOD": period, **random, **alike}
    return Plan(kernel, (programs,), (m, n, *x_s, *residual_s, c.eps), tile, config["num_warps"])


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
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(n, LEAST_BLOCK), **_random(c), "GUARDED": guarded(c.eps)}
    each = config["PROGRAMS"]
    if c.h.element_size() == 2 and bucket(n) == 256 and not in_pieces(c.h, c.dy, c.dh):
        each = 25 if c.in_memory else 28  # what registers hold, 80 or 72 a thread (192 columns: 139 to 110 µs)
    parts = min(triton.cdiv(m, config["ROWS"]), multiprocessors(c.h.device) * each)
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
