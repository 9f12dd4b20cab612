"""Triton kernels of an extremum that saves, for its gradient, a mask: one bit of each element, whether it equals the result.
The gradient then needs no x.

That takes an extent that is in a program's registers when the extremum is known: a tile of rows, columns of up to ``WALK``
elements that a thread walks each, and longer columns of which a tile is still wide enough. Of longer extents forward saves the
extremum of each span, and the gradient reads x in the few spans that have the result.

mask [M, ceil(N / 8), K] uint8, dense: bit i of byte j belongs to element 8 j + i along N. Where the result is NaN no
element equals it, and all bits are 0.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.autograd import reference_gradients
from weft.operators.axis_view import AxisView, result_strides
from weft.operators.configs import Config, Configurations, bucket, grid_of, tiles
from weft.operators.cuda import pointer_aligned
from weft.operators.launch import INTERPRETING, Plan, Plans
from weft.operators.reduction import kernels
from weft.operators.reduction.kernels import known_strides, larger, largest_of_tile, tile_of_program


@triton.jit
def popcount(bits):
    """The number of set bits of an int32, written so that LLVM makes one instruction of it."""
    bits = bits.to(tl.uint32)
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def divided(dy, ties, MOST: tl.constexpr):
    """The gradient of an element that equals the result, and of any other: the bits of PyTorch's ``dy * (x == y) / ties``,
    where 0 * dy of an infinite dy, and 0 / 0 without ties, is NaN.

    By up to MOST = 8 ties a quotient of 16-bit floats lies 2**-15 of itself or more from where its rounding changes, so
    2 units of fp32's last place, which cost a third of the instructions, make no other bit.
    """
    NARROW: tl.constexpr = dy.dtype.primitive_bitwidth == 16
    dy = dy.to(tl.float32)
    if MOST == 2:
        share = dy * tl.where(ties == 2, 0.5, 1.0)
    elif NARROW and MOST <= 8:
        share = dy / ties.to(tl.float32)
    else:
        share = tl.div_rn(dy, ties.to(tl.float32))
    return share, tl.where(ties == 0, float("nan"), dy * 0.0)


# ---- a tile holds all of N -------------------------------------------------------------------------------------------


@triton.jit
def mask_tiles(
    x_ptr, out_ptr, mask_ptr, M, N, K, x_m, x_n, x_k, divisor,
    MAP: tl.constexpr, FINISH: tl.constexpr, OTHER: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, FLAT: tl.constexpr, UNIT: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """out[m, k] = FINISH(the largest of MAP(x[m, :, k])), and its mask. FLAT: rows are dense and powers of two long, so a
    tile is one contiguous range of memory."""
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    row, _, col = tile_of_program(K, 1, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None, None]
    n = tl.arange(0, REACH)[None, :, None]
    k = tl.arange(0, COLS)[None, None, :]
    x_ptr += row * x_m + col * x_k
    if FLAT:
        i = tl.arange(0, ROWS * REACH)
        flat = tl.load(x_ptr + i, mask=i < (M - row) * REACH, other=OTHER).to(tl.float32)
        x = MAP(tl.reshape(flat, [ROWS, REACH, COLS]), 0.0)
    else:
        there = (m < M - row) & (n < N) & (k < K - col)
        lane = m.to(tl.int64) * x_m + n.to(tl.int64) * x_n + k.to(tl.int64) * x_k
        x = MAP(tl.load(x_ptr + lane, mask=there, other=OTHER).to(tl.float32), 0.0)
    best = largest_of_tile(x)  # [ROWS, COLS]
    equal = ((x == best[:, None, :]) & (n < N)).to(tl.int32)
    EACH: tl.constexpr = 8 if REACH > 8 else REACH
    BYTES: tl.constexpr = REACH // EACH
    place_of_bit = tl.arange(0, EACH)[None, None, :, None]
    packed = tl.sum(tl.reshape(equal, [ROWS, BYTES, EACH, COLS]) << place_of_bit, axis=2)
    width = 1 if BYTES == 1 else tl.cdiv(N, 8)
    j = tl.arange(0, BYTES)[None, :, None]
    at = ((row + m) * width + j) * K + col + k
    tl.store(mask_ptr + at, packed.to(tl.uint8), mask=(m < M - row) & (j < width) & (k < K - col))
    m = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, COLS)[None, :]
    result = FINISH(best, divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row + m) * K + col + k, result, mask=(m < M - row) & (k < K - col))


@triton.jit
def gradient_of_mask_tiles(
    dy_ptr, mask_ptr, dx_ptr, M, N, K, dy_m, dy_k, dx_m, dx_n, dx_k,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, FLAT: tl.constexpr, UNIT: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """dx[m, n, k] = dy[m, k] over the number of ties where the element's bit is set, 0 elsewhere."""
    N, K, dx_m, dx_n, dx_k = known_strides(N, K, dx_m, dx_n, dx_k, UNIT, DENSE)
    row, _, col = tile_of_program(K, 1, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None, None]
    k = tl.arange(0, COLS)[None, None, :]
    EACH: tl.constexpr = 8 if REACH > 8 else REACH
    BYTES: tl.constexpr = REACH // EACH
    width = 1 if BYTES == 1 else tl.cdiv(N, 8)
    j = tl.arange(0, BYTES)[None, :, None]
    there = (m < M - row) & (k < K - col)
    at = ((row + m) * width + j) * K + col + k
    packed = tl.load(mask_ptr + at, mask=there & (j < width), other=0).to(tl.int32)
    dy = tl.load(dy_ptr + (row + m) * dy_m + (col + k) * dy_k, mask=there, other=0.0)
    share, nothing = divided(dy, tl.sum(popcount(packed), axis=1)[:, None, :], REACH)
    share = share.to(dx_ptr.dtype.element_ty)[:, :, None, :]  # rounded once a result, not once an element
    nothing = nothing.to(dx_ptr.dtype.element_ty)[:, :, None, :]
    equals = (packed[:, :, None, :] >> tl.arange(0, EACH)[None, None, :, None]) & 1
    dx = tl.where(equals != 0, share, nothing)
    dx_ptr += row * dx_m + col * dx_k
    if FLAT:
        i = tl.arange(0, ROWS * REACH)
        tl.store(dx_ptr + i, tl.reshape(dx, [ROWS * REACH]), mask=i < (M - row) * REACH)
    else:
        n = tl.arange(0, REACH)[None, :, None]
        lane = m.to(tl.int64) * dx_m + n.to(tl.int64) * dx_n + k.to(tl.int64) * dx_k
        tl.store(dx_ptr + lane, tl.reshape(dx, [ROWS, REACH, COLS]), mask=there & (n < N))


# ---- a thread walks along N, which is at most 32 ---------------------------------------------------------------------


@triton.jit
def mask_columns(
    x_ptr, out_ptr, mask_ptr, M, K, x_m, x_n, x_k, divisor,
    MAP: tl.constexpr, FINISH: tl.constexpr, OTHER: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """As ``mask_tiles``. A larger element starts the bits anew, so no element has to stay in a register."""
    _, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    row, _, col = tile_of_program(K, 1, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, COLS)[None, :]
    there = (m < M - row) & (k < K - col)
    x_ptr += row * x_m + col * x_k
    lane = m.to(tl.int64) * x_m + k.to(tl.int64) * x_k
    best = tl.full([ROWS, COLS], -float("inf"), tl.float32)
    bits = tl.full([ROWS, COLS], 0, tl.int32)
    for n in tl.static_range(N):
        x = MAP(tl.load(x_ptr + tl.full((), n, tl.int64) * x_n + lane, mask=there, other=OTHER).to(tl.float32), 0.0)
        mine = tl.full((), 1, tl.int32) << n
        bits = tl.where(x > best, mine, tl.where(x == best, bits | mine, bits))
        best = larger(best, x)
    bits = tl.where(best == best, bits, 0)
    WIDTH: tl.constexpr = (N + 7) // 8
    for j in tl.static_range(WIDTH):
        at = ((row + m) * WIDTH + j) * K + col + k
        tl.store(mask_ptr + at, ((bits >> (8 * j)) & 255).to(tl.uint8), mask=there)
    result = FINISH(best, divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row + m) * K + col + k, result, mask=there)


@triton.jit
def gradient_of_mask_columns(
    dy_ptr, mask_ptr, dx_ptr, M, K, dy_m, dy_k, dx_m, dx_n, dx_k,
    N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """As ``gradient_of_mask_tiles``."""
    _, K, dx_m, dx_n, dx_k = known_strides(N, K, dx_m, dx_n, dx_k, UNIT, DENSE)
    row, _, col = tile_of_program(K, 1, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, COLS)[None, :]
    there = (m < M - row) & (k < K - col)
    WIDTH: tl.constexpr = (N + 7) // 8
    bits = tl.full([ROWS, COLS], 0, tl.int32)
    for j in tl.static_range(WIDTH):
        at = ((row + m) * WIDTH + j) * K + col + k
        bits |= tl.load(mask_ptr + at, mask=there, other=0).to(tl.int32) << (8 * j)
    dy = tl.load(dy_ptr + (row + m) * dy_m + (col + k) * dy_k, mask=there, other=0.0)
    share, nothing = divided(dy, popcount(bits), N)
    share = share.to(dx_ptr.dtype.element_ty)
    nothing = nothing.to(dx_ptr.dtype.element_ty)
    dx_ptr += row * dx_m + col * dx_k
    lane = m.to(tl.int64) * dx_m + k.to(tl.int64) * dx_k
    for n in tl.static_range(N):
        dx = tl.where(((bits >> n) & 1) != 0, share, nothing)
        tl.store(dx_ptr + tl.full((), n, tl.int64) * dx_n + lane, dx, mask=there)


# ---- an extent is longer than a tile: forward saved the extremum of each span -----------------------------------------


@triton.jit
def count_in_spans(
    x_ptr, y_ptr, best_ptr, hits_ptr, M, N, K, PARTS, x_m, x_n, x_k, y_m, y_k,
    FINISH: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, SPAN: tl.constexpr, UNIT: tl.constexpr,
    DENSE: tl.constexpr,
):  # fmt: skip
    """hits[m, part, k] = how many of the SPAN elements of a part equal y[m, k]. x is read only where the part's extremum,
    FINISH(best[m, part, k]), is y."""
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    row, part, col = tile_of_program(K, PARTS, 1, COLS)
    n = tl.arange(0, REACH)[:, None]
    k = tl.arange(0, COLS)[None, :]
    there = k < K - col
    at = part * SPAN
    mine = (row * PARTS + part) * K + col + k
    y = tl.load(y_ptr + row * y_m + (col + k) * y_k, mask=there, other=0.0).to(tl.float32)
    wanted = there & (FINISH(tl.load(best_ptr + mine, mask=there, other=0.0), 1.0) == y)
    hits = tl.full([REACH, COLS], 0.0, tl.float32)
    if tl.max(wanted.to(tl.int32)) > 0:
        x_ptr += row * x_m + at * x_n + col * x_k
        lane = n.to(tl.int64) * x_n + k.to(tl.int64) * x_k
        for step in range(0, SPAN, REACH):
            inside = wanted & (n < SPAN - step) & (n < N - at - step)
            x = tl.load(x_ptr + lane, mask=inside, other=float("nan")).to(tl.float32)
            hits += (x == y).to(tl.float32)
            x_ptr += tl.full((), REACH, tl.int64) * x_n
    tl.store(hits_ptr + mine, tl.sum(hits, axis=0)[None, :], mask=there)


@triton.jit
def gradient_in_spans(
    x_ptr, y_ptr, dy_ptr, ties_ptr, hits_ptr, dx_ptr, M, N, K, PARTS, x_m, x_n, x_k, y_m, y_k, dy_m, dy_k,
    dx_m, dx_n, dx_k,
    REACH: tl.constexpr, COLS: tl.constexpr, SPAN: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dx[m, n, k] = dy[m, k] / ties[m, k] where x equals y, 0 elsewhere, of the SPAN elements of a part; x is read only where
    hits says that some of them equal. ties have the strides of y."""
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    _, _, dx_m, dx_n, dx_k = known_strides(N, K, dx_m, dx_n, dx_k, UNIT, DENSE)
    row, part, col = tile_of_program(K, PARTS, 1, COLS)
    n = tl.arange(0, REACH)[:, None]
    k = tl.arange(0, COLS)[None, :]
    there = k < K - col
    at = part * SPAN
    result = row * y_m + (col + k) * y_k
    y = tl.load(y_ptr + result, mask=there, other=0.0).to(tl.float32)
    ties = tl.load(ties_ptr + result, mask=there, other=1.0)
    dy = tl.load(dy_ptr + row * dy_m + (col + k) * dy_k, mask=there, other=0.0)
    wanted = tl.load(hits_ptr + (row * PARTS + part) * K + col + k, mask=there, other=0.0) > 0
    share, nothing = divided(dy, ties, 2**24)  # of the whole extent, not of a span
    share = share.to(dx_ptr.dtype.element_ty)
    nothing = nothing.to(dx_ptr.dtype.element_ty)
    dx_ptr += row * dx_m + at * dx_n + col * dx_k
    to = n.to(tl.int64) * dx_n + k.to(tl.int64) * dx_k
    dx_step = tl.full((), REACH, tl.int64) * dx_n
    if tl.max(wanted.to(tl.int32)) > 0:
        x_ptr += row * x_m + at * x_n + col * x_k
        lane = n.to(tl.int64) * x_n + k.to(tl.int64) * x_k
        for step in range(0, SPAN, REACH):
            inside = there & (n < SPAN - step) & (n < N - at - step)
            x = tl.load(x_ptr + lane, mask=inside & wanted, other=float("nan")).to(tl.float32)
            tl.store(dx_ptr + to, tl.where(x == y, share, nothing), mask=inside)
            x_ptr += tl.full((), REACH, tl.int64) * x_n
            dx_ptr += dx_step
    else:
        for step in range(0, SPAN, REACH):
            inside = there & (n < SPAN - step) & (n < N - at - step)
            tl.store(dx_ptr + to, tl.broadcast_to(nothing, [REACH, COLS]), mask=inside)
            dx_ptr += dx_step


# ---- launches of a mask ----------------------------------------------------------------------------------------------

MOST = 512 if INTERPRETING else 8192  # elements of a tile
MOST_OF_A_ROW = 512 if INTERPRETING else 32768  # that is a tile by itself
WALK = 32  # elements of a column whose bits one register of a thread holds
NARROW = 64  # columns that a tile has at least where the tensor has as many: 128 bytes of 16-bit floats


def rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Rows of n elements (a power of two; up to SHORT the extent itself)."""
    if n <= kernels.SHORT:
        return {"TILE": 4096 if bucket(n) == n else 1024, "num_warps": 4}
    return {"TILE": max(2048, n), "num_warps": 4 if n <= 4096 else max(8, n // 1024)}


def rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = tiles({"TILE": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)}, 4, 32)
    return [c for c in every if c["TILE"] >= n]


def columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Columns of n elements: up to WALK a thread walks each (TILE counts columns then), longer ones are tiles."""
    if n <= WALK:  # a vector of 16 bytes a thread: then mask, results and elements lie in the same threads
        return {"TILE": 128 * 16 // dtype.itemsize, "num_warps": 4}
    return {"TILE": max(4096, NARROW * n), "num_warps": 8}


def columns_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= WALK:
        return grid_of({"TILE": (256, 512, 1024, 2048, 4096), "num_warps": (2, 4, 8)})
    return [c for c in rows_candidates(sm, dtype, NARROW * n) if c["num_warps"] >= 4]


# of rows and of columns; what limits a mask and its gradient differs, so each is measured for itself
MASK = (
    Configurations(__file__, "mask_rows", rows_heuristic, rows_candidates),
    Configurations(__file__, "mask_columns", columns_heuristic, columns_candidates),
)
GRADIENT = (
    Configurations(__file__, "mask_gradient_rows", rows_heuristic, rows_candidates),
    Configurations(__file__, "mask_gradient_columns", columns_heuristic, columns_candidates),
)


def walked(v: AxisView) -> bool:
    return v.K > 1 and v.N <= WALK


def fits_a_tile(v: AxisView) -> bool:
    most = MOST if v.K > 1 or v.unit() < 4 else MOST_OF_A_ROW  # elements that are stored one by one take too long
    return walked(v) or bucket(v.N) * min(bucket(v.K), 4 if INTERPRETING else NARROW) <= most


def mask_gradient_plan(dy: Tensor, mask: Tensor, dx: Tensor, p: "MaskPlan", strides: tuple[int, int]) -> Plan:
    """Call with ``(dy, mask, dx)``; ``strides`` are those of dy in M and K."""
    pair, v = (gradient_of_mask_columns, gradient_of_mask_tiles), p.dx
    return _plan(pair, GRADIENT, p.v, v, dy, (*strides, v.m, v.n, v.k), {})


def _plan(
    pair: tuple[Any, Any], kinds: tuple[Configurations, Configurations], v: AxisView, at: AxisView, like: Tensor,
    scalars: tuple[Any, ...], formulas: dict[str, Any],
) -> Plan:  # fmt: skip
    """By the kernel that walks along N or the one of whole tiles; ``at`` is the view of the tensor of x's size that is read or
    written."""
    config = kinds[v.K > 1](like.device, like.dtype, v.N if v.N <= kernels.SHORT else bucket(v.N))
    tile, warps = min(config["TILE"], MOST), config["num_warps"]
    constants: dict[str, Any] = dict(formulas)
    if walked(v):
        cols = min(bucket(v.K), tile)
        rows = min(tile // cols, bucket(v.M))
        constants |= {"N": v.N, "ROWS": rows, "COLS": cols}
        extents: tuple[int, ...] = (v.M, v.K)
    else:
        reach = max(2, bucket(v.N))
        cols = min(bucket(v.K), max(tile // reach, 1))
        rows = min(max(tile // (reach * cols), 1), bucket(v.M))
        flat = v.K == 1 and reach == v.N and at.n == 1 and (at.m == v.N or v.M == 1)
        constants |= {"ROWS": rows, "REACH": reach, "COLS": cols, "FLAT": flat}
        extents = (v.M, v.N, v.K)
    constants |= {"UNIT": at.unit(), "DENSE": at.dense_axis}
    grid = (triton.cdiv(v.M, rows) * triton.cdiv(v.K, cols),)
    return Plan(pair[not walked(v)], grid, (*extents, *scalars), constants, warps)


# ---- launches by spans -----------------------------------------------------------------------------------------------

SPAN_TILE = 2048  # elements that are counted at once


def _spans_plan(kernel: Any, spans: kernels.Spans, scalars: tuple[int, ...], first: dict[str, Any], unit: int) -> Plan:
    v = spans.v
    cols = min(bucket(v.K), 256)
    reach = min(bucket(spans.length), SPAN_TILE // cols)
    constants = {**first, "REACH": reach, "COLS": cols, "SPAN": spans.length, "UNIT": unit, "DENSE": v.dense_axis}
    every = (v.M, v.N, v.K, spans.count, v.m, v.n, v.k, *spans.y, *scalars)
    return Plan(kernel, (v.M * spans.count * triton.cdiv(v.K, cols),), every, constants)


def spans_gradient_plan(dy: Tensor, dx: Tensor, p: "SpansPlan", strides: tuple[int, int]) -> Plan:
    """Call with ``(x, y, dy, ties, hits, dx)``; ``strides`` are those of dy in M and K."""
    return _spans_plan(gradient_in_spans, p.spans, (*strides, p.dx.m, p.dx.n, p.dx.k), {}, p.v.unit(p.dx))


mask_gradients, spans_gradients = Plans(mask_gradient_plan), Plans(spans_gradient_plan)

# ---- what forward saves and the gradient takes -----------------------------------------------------------------------


def strides_of(dy: Tensor, dim: int | None, keepdim: bool, transposed: bool) -> tuple[int, int] | None:
    """The strides of a result's gradient in M and K of the view; None where it has no single ones."""
    if dim is None:
        return 0, 0
    strides = result_strides(dy, dim, keepdim)
    return strides[::-1] if strides and transposed else strides


class SavingPlan:
    """An extremum that saves tensors for its gradient. Call with x for the result alone."""

    save: Any  # x -> the result, and the tensors that the gradient takes after dy
    gradient: Any  # (dy, *saved) -> dx
    differentiable: Any  # the same where a gradient of it is wanted

    def __init__(self, c: Any):
        self.v, self.dx = c.views
        self.dim, self.keepdim, self.shape, self.transposed = c.dim, c.keepdim, c.shape, c.transposed

    def __call__(self, x: Tensor) -> Any:
        return self.save(x)[0]

    def with_strides(self, dy: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """dy and its strides in M and K; a copy where it has no single ones: autograd brings gradients of any strides."""
        if (strides := strides_of(dy, self.dim, self.keepdim, self.transposed)) is None:
            dy = dy.contiguous()
            strides = strides_of(dy, self.dim, self.keepdim, self.transposed) or (0, 0)
        return dy, strides


class MaskPlan(SavingPlan):
    """Saves a mask of the elements that equal the result: x may be overwritten or freed.

    Args:
        forward: ``(x, out, mask)``; None for Triton's.
        backward: ``(dy, mask, dx)``, dy dense and on 16 bytes; None for Triton's, which take any strides of dy.
    """

    def __init__(self, c: Any, forward: Callable[..., None] | None = None, backward: Callable[..., None] | None = None):
        super().__init__(c)
        like = torch.empty_like(c.x, device="meta")
        self.size, self.stride = like.size(), like.stride()
        self.forward: Any = forward
        self.backward, v = backward, self.v
        if forward is None:
            formulas = {"MAP": c.formula.map, "FINISH": c.formula.finish, "OTHER": c.formula.other}
            self.forward = _plan((mask_columns, mask_tiles), MASK, v, v, c.x, (v.m, v.n, v.k, 1.0), formulas)
        self.mask_shape = (v.M, -(-v.N // 8), v.K)

    def save(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        mask = torch.empty(self.mask_shape, dtype=torch.uint8, device=x.device)
        self.forward(x, out, mask)
        return out, (mask,)

    def gradient(self, dy: Tensor, mask: Tensor) -> Tensor:
        dx = torch.empty_strided(self.size, self.stride, dtype=dy.dtype, device=dy.device)
        dy, strides = self.with_strides(dy)
        if self.backward is None:
            mask_gradients.of((dy, mask, dx), self, strides)(dy, mask, dx)
        else:
            if (dy.numel() > 1 and strides[0] != 1) or not pointer_aligned(dy):
                dy = dy.clone(memory_format=torch.contiguous_format)  # it has one element a row
            self.backward(dy, mask, dx)
        return dx

    def differentiable(self, dy: Tensor, mask: Tensor) -> Tensor:
        """The gradient where one of it is wanted: PyTorch's formula, linear in dy."""
        equals = self.equals(mask)
        over = tuple(range(equals.ndim)) if self.dim is None else (self.dim,)
        if not self.keepdim:
            dy = dy.view((1,) * equals.ndim) if self.dim is None else dy.unsqueeze(self.dim)
        return dy * equals / equals.sum(over, keepdim=True)

    def equals(self, mask: Tensor) -> Tensor:
        """The mask as booleans of x's shape."""
        shifts = torch.arange(8, dtype=torch.uint8, device=mask.device).view(8, 1)
        every = ((mask.unsqueeze(2) >> shifts) & 1).view(self.v.M, -1, self.v.K)[:, : self.v.N]
        equals = torch.empty_strided(self.size, self.stride, dtype=torch.bool, device=mask.device)
        equals.as_strided(every.shape, (self.dx.m, self.dx.n, self.dx.k)).copy_(every)
        return equals


class SpansPlan(SavingPlan):
    """Saves x, the result and the extremum of each span: the gradient reads x in the spans that have the result."""

    def __init__(self, c: Any):
        super().__init__(c)
        formula = c.formula
        self.spans = kernels.Spans(self.v, c.x.device, c.x.dtype, total=c.dim is None)
        self.first, self.rest = self.spans.first(formula), self.spans.rest(formula)
        self.count = _spans_plan(count_in_spans, self.spans, (), {"FINISH": formula.finish}, self.v.unit())
        self.ties = self.spans.rest(kernels.Formula(kernels.itself, kernels.SUM))
        self.reference, self.order = c.op.reference, c.order

    def save(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        best = torch.empty(self.spans.shape, dtype=torch.float32, device=x.device)
        self.first(x, x, best)  # the second argument is y, which an extremum does not read
        self.rest(best, out)
        return out, (x, out, best)

    def gradient(self, dy: Tensor, x: Tensor, y: Tensor, best: Tensor) -> Tensor:
        dx = torch.empty_like(x)
        dy, strides = self.with_strides(dy)
        hits = torch.empty_like(best)
        ties = torch.empty(self.v.M * self.v.K, dtype=torch.float32, device=x.device)
        self.count(x, y, best, hits)
        self.ties(hits, ties)
        spans_gradients.of((dy, dx), self, strides)(x, y, dy, ties, hits, dx)
        return dx

    def differentiable(self, dy: Tensor, x: Tensor, y: Tensor, best: Tensor) -> Tensor | None:
        how = (self.dim, self.keepdim, self.order)
        return reference_gradients(lambda x: self.reference(x, *how), (x,), (True,), (dy,))[0]
