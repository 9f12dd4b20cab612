"""Triton kernels for RMSNorm and LayerNorm (CENTERED) over rows [M, N], with or without a residual that is ADDED first.

Forward moves 2 tensors (4 with a residual), backward 3 (x, dy, dx); weight and bias [N] stay in cache. Whole rows are kept in
registers where they fit. The weight's and the bias's gradient are sums over all rows: each program adds up its rows in fp32
registers, writes one partial row, and a second kernel adds the partial rows in a fixed order, so they are deterministic.
Reads are marked ``evict_last``: docs/notes/softmax.md says what that brings. Arguments that a flag switches off are
never read.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators import row_programs
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.contiguous import contiguous
from weft.operators.launch import Plan, multiprocessors
from weft.operators.layout import views
from weft.operators.partial_sums import SummedPlan
from weft.operators.row_programs import candidates, fitted, heuristic, in_pieces, row_tiles, tail_of

SMALLEST = torch.finfo(torch.float32).tiny
ONE_PASS_BACKWARD = 8192  # columns that one program holds in registers: x, dy and the weight's partial gradient


@triton.jit
def reciprocal_root(mean_of_squares, eps):
    """1 / sqrt(mean + eps), correctly rounded at each step: it is one number a row."""
    return tl.div_rn(1.0, tl.sqrt_rn((mean_of_squares + eps).to(tl.float32)))  # torch.compile passes eps as a double


@triton.jit
def read(ptr, inside):
    return tl.load(ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def tile(ptr, row, row_stride, col, col_stride):
    return ptr + row[:, None] * row_stride + col[None, :] * col_stride


@triton.jit
def write(ptr, value, inside):
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def scaled(xhat, w_ptr, b_ptr, col, N, WEIGHTED: tl.constexpr, BIASED: tl.constexpr):
    """xhat * w + b for the columns ``col``, the last axis of xhat."""
    if WEIGHTED:
        xhat *= read(w_ptr + col, col < N)
    if BIASED:
        xhat += read(b_ptr + col, col < N)
    return xhat


@triton.jit
def norm_rows(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr, M, N, x_row, x_col, r_row, r_col, y_row, y_col, h_row, h_col,
    eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    """h = x + r; y = (h - mean) * rstd * w + b. One program holds ROWS whole rows, [ROWS, BLOCK] with BLOCK >= N. Without
    CENTERED the mean counts as 0; with SAVED mean and rstd (fp32 [M]) are written."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row[:, None] < M) & (col[None, :] < N)
    x = read(tile(x_ptr, row, x_row, col, x_col), inside)
    if ADDED:
        x += read(tile(r_ptr, row, r_row, col, r_col), inside)
        x = x.to(h_ptr.dtype.element_ty)  # what is normalised is what the next layer gets
        write(tile(h_ptr, row, h_row, col, h_col), x, inside)
        x = x.to(tl.float32)
    if CENTERED:
        mean = tl.sum(x, axis=1) / N
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = reciprocal_root(tl.sum(x * x, axis=1) / N, eps)
    if SAVED:
        tl.store(mean_ptr + row, mean, mask=row < M)
        tl.store(rstd_ptr + row, rstd, mask=row < M)
    y = scaled(x * rstd[:, None], w_ptr, b_ptr, col[None, :], N, WEIGHTED, BIASED)
    write(tile(y_ptr, row, y_row, col, y_col), y, inside)


@triton.jit
def norm_long_rows(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr, M, N, x_row, x_col, r_row, r_col, y_row, y_col, h_row, h_col,
    eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, ADDED: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    """The same for rows that do not fit: one program walks them twice, the second time from L2 where they fit. The variance is
    taken around a row's first element, which is near enough to the mean that nothing cancels of 16-bit floats; of 32 bits
    around the mean of the first BLOCK."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    around = tl.zeros([ROWS, 1], tl.float32)
    if CENTERED and x_ptr.dtype.element_ty == tl.float32:
        col = columns.to(tl.int64)
        inside = (row[:, None] < M) & (col[None, :] < N)
        first = read(tile(x_ptr, row, x_row, col, x_col), inside)
        if ADDED:
            first += read(tile(r_ptr, row, r_row, col, r_col), inside)
        around = (tl.sum(first, axis=1) / tl.minimum(N, BLOCK))[:, None]
    elif CENTERED:
        around = tl.load(x_ptr + row * x_row, mask=row < M, other=0.0).to(tl.float32)[:, None]
        if ADDED:
            around += tl.load(r_ptr + row * r_row, mask=row < M, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = (start + columns).to(tl.int64)
        inside = (row[:, None] < M) & (col[None, :] < N)
        x = read(tile(x_ptr, row, x_row, col, x_col), inside)
        if ADDED:
            x += read(tile(r_ptr, row, r_row, col, r_col), inside)
            x = x.to(h_ptr.dtype.element_ty)
            write(tile(h_ptr, row, h_row, col, h_col), x, inside)
            x = x.to(tl.float32)
        total += x
        x = tl.where(inside, x - around, 0.0)
        squares += x * x
    mean = (tl.sum(total, axis=1) / N)[:, None]
    variance = (tl.sum(squares, axis=1) / N)[:, None]
    if CENTERED:
        variance = tl.maximum(variance - (mean - around) * (mean - around), 0.0, tl.PropagateNan.ALL)
    rstd = reciprocal_root(variance, eps)
    if SAVED:
        tl.store(mean_ptr + row[:, None], mean, mask=row[:, None] < M)
        tl.store(rstd_ptr + row[:, None], rstd, mask=row[:, None] < M)
    if ADDED:  # what was written is read again; another thread may have written it
        tl.debug_barrier()
        x_ptr, x_row, x_col = h_ptr, h_row, h_col
    for start in range(0, N, BLOCK):
        col = (start + columns).to(tl.int64)
        inside = (row[:, None] < M) & (col[None, :] < N)
        at = tile(x_ptr, row, x_row, col, x_col)
        x = tl.load(at, mask=inside, eviction_policy="evict_first").to(tl.float32)
        if CENTERED:
            x -= mean
        y = scaled(x * rstd, w_ptr, b_ptr, col[None, :], N, WEIGHTED, BIASED)
        write(tile(y_ptr, row, y_row, col, y_col), y, inside)


# ---- backward: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + more, with g = w * dy ------------------------------


@triton.jit
def weights_and_sums(w_ptr, col, N, ROWS: tl.constexpr, WEIGHTED: tl.constexpr):
    """The weight of these columns, and their partial sums of weight's and bias's gradients, none yet."""
    if WEIGHTED:
        zeros = tl.zeros([ROWS, col.shape[0]], tl.float32)
        return read(w_ptr + col, col < N)[None, :], zeros, zeros
    else:
        return 1.0, 0.0, 0.0


@triton.jit
def added(x, dy, mean, rstd, w, dw, db, inside, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr):
    """xhat and g = w * dy, and the sums with these rows in them."""
    if CENTERED:
        xhat = tl.where(inside, (x - mean) * rstd, 0.0)
    else:
        xhat = x * rstd
    g = dy
    if WEIGHTED:
        dw += dy * xhat
        if CENTERED:
            db += dy
        g = dy * w
    return xhat, g, dw, db


@triton.jit
def write_sums(dw_ptr, db_ptr, col, N, dw, db, CENTERED: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + col
    tl.store(dw_ptr + at, tl.sum(dw, axis=0), mask=col < N)
    if CENTERED:
        tl.store(db_ptr + at, tl.sum(db, axis=0), mask=col < N)


@triton.jit
def gradient_rows(
    x_ptr, dy_ptr, more_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, M, N, x_row, x_col, dy_row, dy_col, more_row,
    more_col, dx_row, dx_col, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    CENTERED: tl.constexpr, WEIGHTED: tl.constexpr, MORE: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """A persistent grid: program p takes row blocks p, p + programs, … and leaves its sums in row p of dw and db. Without
    CENTERED there is no mean, and rstd is computed again, which costs no memory traffic; of rows that are not there it is
    infinite without an epsilon, unless GUARDED. A row is held in a tile of BLOCK
    columns, and in one of TAIL behind it where BLOCK is less than N (``row_programs.tail_of``)."""
    col, rest = tl.arange(0, BLOCK), BLOCK + tl.arange(0, max(TAIL, 1))
    w, dw, db = weights_and_sums(w_ptr, col, N, ROWS, WEIGHTED)
    if TAIL > 0:
        w_rest, dw_rest, db_rest = weights_and_sums(w_ptr, rest, N, ROWS, WEIGHTED)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < M) & (col < N)[None, :]
        behind = (row[:, None] < M) & (rest < N)[None, :]
        x = read(tile(x_ptr, row, x_row, col, x_col), inside)
        dy = read(tile(dy_ptr, row, dy_row, col, dy_col), inside)
        if TAIL > 0:
            x_rest = read(tile(x_ptr, row, x_row, rest, x_col), behind)
            dy_rest = read(tile(dy_ptr, row, dy_row, rest, dy_col), behind)
        mean = 0.0
        if CENTERED:
            rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
            mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)[:, None]
        else:
            squares = tl.sum(x * x, axis=1)
            if TAIL > 0:
                squares += tl.sum(x_rest * x_rest, axis=1)
            rstd = reciprocal_root(squares / N, eps)[:, None]
            if GUARDED:
                rstd = tl.where((row < M)[:, None], rstd, 0.0)
        xhat, g, dw, db = added(x, dy, mean, rstd, w, dw, db, inside, CENTERED, WEIGHTED)
        along = tl.sum(g * xhat, axis=1)
        if TAIL > 0:
            xhat_rest, g_rest, dw_rest, db_rest = added(
                x_rest, dy_rest, mean, rstd, w_rest, dw_rest, db_rest, behind, CENTERED, WEIGHTED
            )
            along += tl.sum(g_rest * xhat_rest, axis=1)
        dx = g - xhat * (along / N)[:, None]
        if CENTERED:
            level = tl.sum(g, axis=1)
            if TAIL > 0:
                level += tl.sum(g_rest, axis=1)
            dx -= (level / N)[:, None]
        dx *= rstd
        if MORE:
            dx += read(tile(more_ptr, row, more_row, col, more_col), inside)
        write(tile(dx_ptr, row, dx_row, col, dx_col), dx, inside)
        if TAIL > 0:
            dx = g_rest - xhat_rest * (along / N)[:, None]
            if CENTERED:
                dx -= (level / N)[:, None]
            dx *= rstd
            if MORE:
                dx += read(tile(more_ptr, row, more_row, rest, more_col), behind)
            write(tile(dx_ptr, row, dx_row, rest, dx_col), dx, behind)
    if WEIGHTED:
        write_sums(dw_ptr, db_ptr, col, N, dw, db, CENTERED)
        if TAIL > 0:
            write_sums(dw_ptr, db_ptr, rest, N, dw_rest, db_rest, CENTERED)


@triton.jit
def gradient_sums(
    x_ptr, dy_ptr, w_ptr, mean_ptr, rstd_ptr, scale_ptr, along_ptr, level_ptr, M, N, x_row, x_col, dy_row, dy_col, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """For long rows: rstd, mean(g * xhat) and mean(g), fp32 [M] each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    dots = tl.zeros([ROWS, BLOCK], tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if CENTERED:
        mean = tl.load(mean_ptr + row, mask=row < M, other=0.0)[:, None]
    for start in range(0, N, BLOCK):
        col = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = (row[:, None] < M) & (col[None, :] < N)
        x = read(tile(x_ptr, row, x_row, col, x_col), inside)
        g = read(tile(dy_ptr, row, dy_row, col, dy_col), inside)
        if WEIGHTED:
            g *= read(w_ptr + col, col < N)[None, :]
        if CENTERED:
            x -= mean
        squares += x * x
        dots += x * g
        total += g
    if CENTERED:
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)
    else:
        rstd = reciprocal_root(tl.sum(squares, axis=1) / N, eps)
    tl.store(scale_ptr + row, rstd, mask=row < M)
    tl.store(along_ptr + row, tl.sum(dots, axis=1) * rstd / N, mask=row < M)
    tl.store(level_ptr + row, tl.sum(total, axis=1) / N, mask=row < M)


@triton.jit
def gradient_columns(
    x_ptr, dy_ptr, more_ptr, w_ptr, mean_ptr, scale_ptr, along_ptr, level_ptr, dx_ptr, dw_ptr, db_ptr, M, N, x_row, x_col,
    dy_row, dy_col, more_row, more_col, dx_row, dx_col, STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CENTERED: tl.constexpr, WEIGHTED: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Given those: dx and partial sums for STRIP rows of BLOCK columns; grid (columns, strips)."""
    strip = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_row = col < N
    if WEIGHTED:
        w = read(w_ptr + col, in_row)[None, :]
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
        db = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, min(STRIP, M - tl.program_id(1) * STRIP), ROWS):
        row = strip * STRIP + start + tl.arange(0, ROWS)
        inside = (row[:, None] < M) & in_row[None, :]
        x = read(tile(x_ptr, row, x_row, col, x_col), inside)
        g = read(tile(dy_ptr, row, dy_row, col, dy_col), inside)
        if CENTERED:
            x -= tl.load(mean_ptr + row, mask=row < M, other=0.0)[:, None]
        rstd = tl.load(scale_ptr + row, mask=row < M, other=0.0)[:, None]
        xhat = tl.where(inside, x * rstd, 0.0)
        if WEIGHTED:
            dw += g * xhat
            db += g
            g *= w
        dx = g - xhat * tl.load(along_ptr + row, mask=row < M, other=0.0)[:, None]
        if CENTERED:
            dx -= tl.load(level_ptr + row, mask=row < M, other=0.0)[:, None]
        dx *= rstd
        if MORE:
            dx += read(tile(more_ptr, row, more_row, col, more_col), inside)
        write(tile(dx_ptr, row, dx_row, col, dx_col), dx, inside)
    if WEIGHTED:
        at = strip * N + col
        tl.store(dw_ptr + at, tl.sum(dw, axis=0), mask=in_row)
        if CENTERED:
            tl.store(db_ptr + at, tl.sum(db, axis=0), mask=in_row)


# ---- launches, of a NormCall or a GradientCall (dispatch.py) ---------------------------------------------------------


def with_copies(launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The launch, of contiguous copies of the tensors that no kernel reads in place (``copied``)."""

    @functools.wraps(launch)
    def made(c: Any) -> Any:
        plan, copied = launch(c), c.copied
        if not copied:
            return plan
        return lambda *tensors: plan(*(contiguous(t) if i in copied else t for i, t in enumerate(tensors)))

    return made


# LayerNorm takes two sums one after the other and wants other tiles than RMSNorm.
forward_configuration = Configurations(
    __file__, "forward", lambda *key: heuristic(*key[:3]), lambda *key: candidates(*key[:3])
)


def forward_config(c: Any, strides: tuple[int, ...], m: int, n: int) -> Config:
    config = forward_configuration(c.x.device, c.x.dtype, bucket(n), c.config.centered)
    tensors = [c.x, *([] if c.residual is None else [c.residual]), torch.empty_like(c.x, device="meta")]
    if row_programs.lie_apart(strides):
        alone = c.x.dtype == torch.float32 and not (c.config.centered or c.config.added)
        if alone and 256 < n <= 1024 and m >= 64 * multiprocessors(c.x.device):  # 128 bytes of each column, whole rows
            return {"ROWS": 32, "num_warps": bucket(n) // 32}
        return row_programs.side_by_side(c.x, m, n)
    pieces = in_pieces(*tensors)
    if pieces and n > (1024 if c.x.element_size() == 2 else 2048) and m >= 8 * multiprocessors(c.x.device):
        return {"ROWS": 2, "BLOCK": 512, "num_warps": 4}  # less padding, and more rows in flight
    return fitted(config, c.x, n, pieces)


@with_copies
def rows_launch(c: Any) -> Plan:
    norm, residual = c.config, c.x if c.residual is None else c.residual
    (m, n, *x_s), (_, _, *r_s), (_, _, *y_s) = views(c.x, residual, torch.empty_like(c.x, device="meta"))
    config = forward_config(c, (*x_s, *r_s, *y_s), m, n)
    flags = {**norm.flags, "BIASED": norm.biased, "ADDED": norm.added, "SAVED": c.saved}
    return row_programs.plan((norm_rows, norm_long_rows), config, m, n, (m, n, *x_s, *r_s, *y_s, *y_s, c.eps), flags)


def backward_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """PROGRAMS a multiprocessor; about 8 elements a thread, since it holds three tensors and a partial sum."""
    if n > ONE_PASS_BACKWARD:
        return {"STRIP": 64, "ROWS": 4, "BLOCK": 1024, "num_warps": 8}
    rows = max(1, 2048 // n)
    return {"ROWS": rows, "PROGRAMS": 2, "num_warps": min(max(rows * n // 256, 4), 16)}


# Of rows in pieces (``row_programs.in_pieces``) few warps a program are faster; measured at 10 shapes.
PIECES = {
    2: {b: {"ROWS": 512 // b, "PROGRAMS": 16, "num_warps": 1} for b in (128, 256, 512)}
    | {1024: {"ROWS": 1, "PROGRAMS": 8, "num_warps": 2}, 2048: {"ROWS": 1, "PROGRAMS": 6, "num_warps": 4}}
    | {16384: {"ROWS": 1, "PROGRAMS": 1, "num_warps": 32}},
    4: {b: {"ROWS": 1024 // b, "PROGRAMS": 8, "num_warps": 2} for b in (128, 256, 512)}
    | {2048: {"ROWS": 1, "PROGRAMS": 8, "num_warps": 2}},
}


# Of those that two tiles hold (``row_programs.tail_of``), the second of at most an eighth above 1024 columns; measured at 5.
IN_TWO = {
    2: {
        256: {"ROWS": 1, "PROGRAMS": 28, "num_warps": 1},
        1024: {"ROWS": 1, "PROGRAMS": 12, "num_warps": 1},
        2048: {"ROWS": 1, "PROGRAMS": 6, "num_warps": 4},
    },
    4: {4096: {"ROWS": 1, "PROGRAMS": 2, "num_warps": 8}},
}


def of_pieces(c: Any) -> Config:
    """A configuration of PIECES or IN_TWO, or none, less the programs that a multiprocessor's registers do not hold as compiled
    for sm_90: a program that waits for another one to end takes the kernel as long again."""
    n, size, b, tail = c.n, c.x.element_size(), bucket(c.n), tail_of(c.n)
    centered, both, odd = c.config.centered, c.config.centered and c.added, n % 2
    if b in IN_TWO[size] and tail and (n <= 1024 or 16 * tail <= b):
        config, fewer = {**IN_TWO[size][b], "TAIL": tail}, {1024: 3 * both, 2048: 2 * centered or c.added}
    elif b in PIECES[size]:
        config = PIECES[size][b]
        quarters = {128: both, 256: both, 512: centered or c.added}
        if size == 2:
            quarters = {128: both, 256: centered and odd, 512: both, 1024: (centered or odd) + (both and odd)}
        fewer = {width: count * (config["PROGRAMS"] // 4) for width, count in quarters.items()}
    else:
        return {}
    return {**config, "PROGRAMS": config["PROGRAMS"] - fewer.get(b, 0)}


def gradient_pieces(c: Any) -> bool:
    return in_pieces(c.x, c.dy, *([c.more] if c.added else []), torch.empty_like(c.x, device="meta"))


def holds_rows(c: Any) -> bool:
    """Whether a program of the gradient holds whole rows; LayerNorm's holds two sums a column, and so fewer columns."""
    longest = 2 * ONE_PASS_BACKWARD if c.x.element_size() == 2 and not c.config.centered else ONE_PASS_BACKWARD
    return not rows_beside(c) and (c.n <= ONE_PASS_BACKWARD or (c.n <= longest and gradient_pieces(c)))


def backward_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n > ONE_PASS_BACKWARD:
        return grid_of({"STRIP": (32, 64, 128), "ROWS": (1, 2, 4, 8), "BLOCK": (512, 1024, 2048), "num_warps": (4, 8)})
    return row_tiles(n, {"PROGRAMS": (1, 2, 4, 8), "num_warps": (4, 8, 16)}, per_thread=(4, 32))


backward_configuration = Configurations(__file__, "backward", backward_heuristic, backward_candidates)


def gradient_views(c: Any) -> list[tuple[int, int, int, int]]:
    return views(c.x, c.dy, c.more, torch.empty_like(c.x, device="meta"))


def guarded(eps: float) -> bool:
    """Whether eps may vanish in fp32, so that 1 / deviation of a row of zeros is infinite; else the guard is left out, which
    cost up to 4 % of the time."""
    return not eps >= SMALLEST


@with_copies
def gradient_rows_launch(c: Any) -> SummedPlan:
    (m, n, *x_s), (_, _, *dy_s), (_, _, *more_s), (_, _, *dx_s) = gradient_views(c)
    config = of_pieces(c) if gradient_pieces(c) else {}
    config = config or backward_configuration(c.x.device, c.x.dtype, bucket(n))
    programs = min(triton.cdiv(m, config["ROWS"]), multiprocessors(c.x.device) * config["PROGRAMS"])
    tail = config.get("TAIL", 0)
    block = bucket(n) // 2 if tail else bucket(n)
    tile = {
        "ROWS": config["ROWS"],
        "BLOCK": block,
        "TAIL": tail,
        **c.config.flags,
        "MORE": c.added,
        "GUARDED": guarded(c.eps),
    }
    rows = Plan(gradient_rows, (programs,), (m, n, *x_s, *dy_s, *more_s, *dx_s, c.eps), tile, config["num_warps"])
    return SummedPlan(rows, programs, n, c.sums)


BESIDE = {"STRIP": 128, "ROWS": 64, "BLOCK": 32, "num_warps": 8}  # where rows lie side by side


def rows_beside(c: Any) -> bool:
    """Whether rows of any of the tensors lie side by side."""
    return row_programs.lie_apart(stride for view in gradient_views(c) for stride in view[2:])


@with_copies
def gradient_columns_launch(c: Any) -> SummedPlan:
    (m, n, *x_s), (_, _, *dy_s), (_, _, *more_s), (_, _, *dx_s) = gradient_views(c)
    tile, warps = {"ROWS": 1, "BLOCK": 8192}, 16  # of the sums
    if rows_beside(c):
        config, tile = BESIDE, {"ROWS": 32, "BLOCK": 128}
    elif gradient_pieces(c):  # fewer elements a program, of which more share a multiprocessor
        config = {"STRIP": 32, "ROWS": 4, "BLOCK": 2048 // c.x.element_size(), "num_warps": 8}
        tile, warps = {"ROWS": 1, "BLOCK": 1024}, 8
    else:
        config = backward_configuration(c.x.device, c.x.dtype, bucket(n))
    flags, programs = c.config.flags, triton.cdiv(m, tile["ROWS"])
    sums = Plan(gradient_sums, (programs,), (m, n, *x_s, *dy_s, c.eps), {**tile, **flags}, warps)
    strip = max(config["STRIP"], bucket(-(-m // 65535)))  # the grid's second dimension ends at 65535
    strips = triton.cdiv(m, strip)
    tile = {"STRIP": strip, "ROWS": config["ROWS"], "BLOCK": config["BLOCK"], **flags, "MORE": c.added}
    grid = (triton.cdiv(n, config["BLOCK"]), strips)
    columns = Plan(gradient_columns, grid, (m, n, *x_s, *dy_s, *more_s, *dx_s), tile, config["num_warps"])

    def launch(
        x: Tensor, dy: Tensor, more: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *written: Tensor
    ) -> None:
        scale, along, level = torch.empty((3, m), dtype=torch.float32, device=x.device).unbind(0)
        sums(x, dy, weight, mean, rstd, scale, along, level)
        columns(x, dy, more, weight, mean, scale, along, level, *written)

    return SummedPlan(launch, strips, n, c.sums)
