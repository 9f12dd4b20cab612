"""The Triton kernels of sums, means, maxima, minima and norms over a view [M, N, K] of a tensor along N, and their launches.

M is what lies before the reduced axis, K what lies after it; a reduction over everything is M = K = 1. One program reduces a
tile [ROWS, REACH, COLS]: element by element in each thread as it walks along N, across threads once at the end, so an element
costs one operation and a result a few shuffles. The order depends on shapes only, never on timing.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.axis_view import AxisView
from weft.operators.configs import Config, Configurations, bucket, grid_of, tiles
from weft.operators.cuda import pointer_aligned
from weft.operators.launch import INTERPRETING, Plan, multiprocessors

# ---- formulas: MAP is an element's contribution, COMBINE joins two, FOLD a tile along its axis 1, FINISH makes the result


@triton.jit
def itself(x, y):
    return x


@triton.jit
def negative(x, y):
    return -x


@triton.jit
def magnitude(x, y):
    return tl.abs(x)


@triton.jit
def square(x, y):
    return x * x


@triton.jit
def equal_magnitude(x, y):
    """Counts as PyTorch does for the gradient of a maximum of magnitudes: NaN is among the largest."""
    return ((tl.abs(x) == y) | (x != x)).to(tl.float32)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sum_of_tile(tile):
    return tl.sum(tile, axis=1)


@triton.jit
def largest_of_tile(tile):
    return tl.reduce(tile, 1, larger)


@triton.jit
def as_is(total, n):
    return total


@triton.jit
def over_n(total, n):
    return tl.div_rn(total, n)


@triton.jit
def root(total, n):
    return tl.sqrt_rn(total)


@triton.jit
def negated(total, n):
    return -total


# ---- reduction -------------------------------------------------------------------------------------------------------


@triton.jit
def tile_of_program(K, PARTS, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's first row, its part of N and its first column, in int64: tensors may hold more than 2**31 elements.
    Columns vary fastest, so that neighbouring programs read neighbouring memory."""
    program = tl.program_id(0)
    blocks = tl.cdiv(K, COLS)
    part = program // blocks % PARTS
    return (program // blocks // PARTS).to(tl.int64) * ROWS, part.to(tl.int64), (program % blocks).to(tl.int64) * COLS


@triton.jit
def known_multiple(value, UNIT: tl.constexpr):
    """The value, known to the compiler as a multiple of UNIT, which 16-byte accesses need. Triton itself recognizes
    multiples of 16 only."""
    return value // UNIT * UNIT


@triton.jit
def known_strides(N, K, x_m, x_n, x_k, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """UNIT divides every stride but the one of the DENSE axis (1: N, 2: K), which is 1, and the extent of that axis."""
    if DENSE == 1:
        return known_multiple(N, UNIT), K, known_multiple(x_m, UNIT), x_n, known_multiple(x_k, UNIT)
    elif DENSE == 2:
        return N, known_multiple(K, UNIT), known_multiple(x_m, UNIT), known_multiple(x_n, UNIT), x_k
    else:
        return N, K, x_m, x_n, x_k


@triton.jit
def reduce_tiles(
    x_ptr, y_ptr, out_ptr, M, N, K, PARTS, x_m, x_n, x_k, y_m, y_k, divisor,
    MAP: tl.constexpr, COMBINE: tl.constexpr, FOLD: tl.constexpr, FINISH: tl.constexpr, NEUTRAL: tl.constexpr,
    OTHER: tl.constexpr, COMPARED: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, UNROLL: tl.constexpr,
    CHUNK: tl.constexpr, ONCE: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
    VECTOR: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """out[m, part, k] = FINISH(COMBINE over n of MAP(x[m, n, k], y[m, k]), divisor), n from the CHUNK of that part.

    x and y have any strides (y is read if COMPARED); out [M, PARTS, K] is dense. OTHER is the value of x outside of the
    tensor: it must not change the result. ONCE: one step covers N. FLAT: rows are dense and powers of two long, so a tile is
    one contiguous range of memory; it is loaded as such and reduced in registers.

    VECTOR > 0: a row begins anywhere, and its elements are APART from each other. Vectors of so many are read, from the one
    that the row begins in, as an access of 16 bytes on 16 bytes that has an element of x is one of memory that there is. N is
    what the span of a row and VECTOR - 1 more take.
    """
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    row, part, col = tile_of_program(K, PARTS, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None, None]
    n = tl.arange(0, REACH)[None, :, None]
    k = tl.arange(0, COLS)[None, None, :]
    there = (m < M - row) & (k < K - col)
    at = part * CHUNK
    x_ptr += row * x_m + at * x_n + col * x_k
    y = 0.0
    if COMPARED:
        y = tl.load(y_ptr + (row + m) * y_m + (col + k) * y_k, mask=there, other=0.0).to(tl.float32)
    if FLAT:
        i = tl.arange(0, ROWS * REACH)
        x = tl.load(x_ptr + i, mask=i < (M - row) * REACH, other=OTHER).to(tl.float32)
        total = tl.reshape(MAP(x, y), [ROWS, REACH, 1])
    elif VECTOR > 0:
        total = tl.full([ROWS, REACH, 1], NEUTRAL, tl.float32)
        address = (x_ptr + m.to(tl.int64) * x_m - at).to(tl.int64)  # of a row
        span, skipped = N - (VECTOR - 1), (address % 16 // (16 // VECTOR)).to(tl.int32)
        x_ptr = (address - address % 16).to(x_ptr.dtype) + (at + n)
        x_ptr = tl.max_contiguous(tl.multiple_of(x_ptr, [16, 16, 16]), [1, REACH, 1])
        vector = n // VECTOR * VECTOR + at.to(tl.int32)
        n += at.to(tl.int32) - skipped
        left = (span - at).to(tl.int32)  # of a row that begins on its first vector, and so of any row
        for start in range(0, tl.minimum(N - at, CHUNK).to(tl.int32), REACH * UNROLL):
            if ROWS == 1 and APART == 1 and (start + at > 0) & (start + REACH * UNROLL <= left):  # all of this row
                for u in tl.static_range(UNROLL):
                    total = COMBINE(total, MAP(tl.load(x_ptr + u * REACH).to(tl.float32), y))
            else:
                for u in tl.static_range(UNROLL):
                    some = there & (vector + u * REACH < span + skipped)
                    x = tl.load(x_ptr + u * REACH, mask=some, other=OTHER).to(tl.float32)
                    inside = (n + u * REACH).to(tl.uint32, bitcast=True) < span.to(tl.uint32)  # so not negative either
                    if APART > 1:
                        inside &= (n + u * REACH) % APART == 0
                    total = COMBINE(total, MAP(tl.where(inside, x, OTHER), y))
            x_ptr += REACH * UNROLL
            vector += REACH * UNROLL
            n += REACH * UNROLL
    else:
        total = tl.full([ROWS, REACH, COLS], NEUTRAL, tl.float32)
        lane = m.to(tl.int64) * x_m + n.to(tl.int64) * x_n + k.to(tl.int64) * x_k
        step = tl.full((), REACH, tl.int64) * x_n
        if not ONCE:
            for _ in range(0, (tl.minimum(N - at, CHUNK) // (REACH * UNROLL)).to(tl.int32)):
                for u in tl.static_range(UNROLL):
                    x = tl.load(x_ptr + u * step + lane, mask=there, other=OTHER).to(tl.float32)
                    total = COMBINE(total, MAP(x, y))
                x_ptr += UNROLL * step
                at += REACH * UNROLL
        if ONCE or at < tl.minimum(N, part * CHUNK + CHUNK):
            for u in tl.static_range(UNROLL):
                x = tl.load(x_ptr + u * step + lane, mask=there & (n + u * REACH < N - at), other=OTHER).to(tl.float32)
                total = COMBINE(total, MAP(x, y))
    if REACH == 1:
        total = tl.reshape(total, [ROWS, COLS])
    else:
        total = FOLD(total)
    m = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, COLS)[None, :]
    result = FINISH(total, divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + ((row + m) * PARTS + part) * K + col + k, result, mask=(m < M - row) & (k < K - col))


# ---- the gradient of a norm ------------------------------------------------------------------------------------------


# y, dy and ties have one element a result, [ROWS, 1, COLS]: what depends on them alone, such as a division, costs little.


@triton.jit
def share_of_magnitude(x, y, dy, ties):
    share = tl.div_rn(dy, ties)
    return sign(x) * tl.where((tl.abs(x) == y) | (x != x), share, share * 0.0)


@triton.jit
def direction(x, y, dy, ties):
    """dy * x / y, and 0 where y is. A root of squares is no denormal number, so its reciprocal is finite."""
    return x * tl.where(y == 0, 0.0, tl.div_rn(1.0, y)) * dy


@triton.jit
def signed_by(x, y, dy, ties):
    return sign(x) * dy


@triton.jit
def sign(x):
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def gradient_tiles(
    x_ptr, y_ptr, dy_ptr, ties_ptr, hits_ptr, dx_ptr, M, N, K, PARTS, HITS, x_m, x_n, x_k, y_m, y_k, dy_m, dy_k,
    dx_m, dx_n, dx_k,
    F: tl.constexpr, TIE: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dx[m, n, k] = F(x[m, n, k], y[m, k], dy[m, k], ties[m, k]); ties have the strides of y.

    COUNT 0: F needs no ties. 1: a tile holds all of N and counts the elements for which TIE(x, y) is 1. 2: an earlier launch
    counted them, hits [M, HITS, K] in each SPAN of n: in a span without any x is not read again.
    """
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    _, _, dx_m, dx_n, dx_k = known_strides(N, K, dx_m, dx_n, dx_k, UNIT, DENSE)
    row, part, col = tile_of_program(K, PARTS, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None, None]
    n = tl.arange(0, REACH)[None, :, None]
    k = tl.arange(0, COLS)[None, None, :]
    one = (m < M - row) & (k < K - col)
    at = part * REACH
    every = one & (n < N - at)
    wanted = every
    if COUNT == 2:
        hits = tl.load(hits_ptr + ((row + m) * HITS + at // SPAN) * K + col + k, mask=one, other=0.0)
        wanted = every & (hits > 0)
    x_ptr += row * x_m + at * x_n + col * x_k
    x_ptr += m.to(tl.int64) * x_m + n.to(tl.int64) * x_n + k.to(tl.int64) * x_k
    x = tl.load(x_ptr, mask=wanted, other=0.0, eviction_policy="evict_last")  # the hint: docs/notes/reduction.md
    y = tl.load(y_ptr + (row + m) * y_m + (col + k) * y_k, mask=one, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + (row + m) * dy_m + (col + k) * dy_k, mask=one, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    ties = 1.0
    if COUNT == 1:
        ties = tl.sum(tl.where(every, TIE(x, y), 0.0), axis=1)[:, None, :]
    if COUNT == 2:
        ties = tl.load(ties_ptr + (row + m) * y_m + (col + k) * y_k, mask=one, other=1.0)
    dx = F(x, y, dy, ties).to(dx_ptr.dtype.element_ty)
    dx_ptr += row * dx_m + at * dx_n + col * dx_k
    tl.store(dx_ptr + m.to(tl.int64) * dx_m + n.to(tl.int64) * dx_n + k.to(tl.int64) * dx_k, dx, mask=every)


# ---- how N is tiled --------------------------------------------------------------------------------------------------

SHORT = 8  # extents up to here may be walked in registers, one element of each result at a time
LONGEST = 2**18  # extents beyond are configured alike
FEW = 2**16  # elements that are not worth a second launch
LOOSE = {2: 4096, 4: 16384}  # elements, by their bytes, of rows that begin anywhere from which on such vectors pay
MANY, PROGRAMS = 2**22, 8  # elements that are worth so many programs for each multiprocessor


def rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Rows of n elements (a power of two; up to SHORT the extent itself)."""
    if n <= SHORT:
        power = bucket(n) == n
        return {"TILE": 4096 if power else 1024, "WALK": 0 if power else 1, "num_warps": 4}
    if n > 4096:
        return {"TILE": 8192, "CHUNK": 2**16, "num_warps": 8}
    return {"TILE": 4096, "CHUNK": 2**16, "num_warps": 4}


def rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= SHORT:
        walk = grid_of({"TILE": (256, 512, 1024, 2048), "WALK": (1,), "num_warps": (2, 4, 8)})
        return [*walk, *grid_of({"TILE": (2048, 4096, 8192), "WALK": (0,), "num_warps": (2, 4, 8)})]
    # several loads before the first sum: as one tile they would take a register an element for sums as well
    steps = {"TILE": (512, 1024, 2048, 4096, 8192), "UNROLL": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16)}
    chunks = (2**16,) if n <= 4096 else (2**14, 2**16, 2**18)
    vector = 16 // dtype.itemsize

    def sound(c: Config) -> bool:
        each, step = c["TILE"] // (32 * c["num_warps"]), c["TILE"] * c["UNROLL"]
        fits = (c["UNROLL"] == 1 or step <= n) and step >= min(n, 4096)
        return fits and vector <= each <= 32 and 16 <= each * c["UNROLL"] <= 64

    return [c for c in grid_of({**steps, "CHUNK": chunks}) if sound(c)]


def columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Columns of n elements; CHUNK counts elements of one column."""
    if n <= SHORT:
        return {"TILE": 1024, "WIDTH": 1024, "UNROLL": n, "CHUNK": n, "num_warps": 4}
    return {"TILE": 1024, "WIDTH": 64, "UNROLL": 8, "CHUNK": 1024, "num_warps": 4}


def short_columns_candidates(n: int) -> list[Config]:
    every = grid_of({"TILE": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)})
    return [{**c, "WIDTH": c["TILE"], "UNROLL": n, "CHUNK": n} for c in every]


def columns_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= SHORT:
        return short_columns_candidates(n)
    choices = {"TILE": (1024, 2048, 4096), "WIDTH": (128, 256, 512, 1024), "UNROLL": (1, 2, 4, 8)}
    return tiles({**choices, "CHUNK": (256, 1024), "num_warps": (4, 8)}, 16, 64, of=("TILE", "UNROLL"))


def partials_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    if n <= SHORT:
        return rows_heuristic(sm, dtype, n)
    return {"TILE": 4096 if n > 2048 else 2048, "CHUNK": 2**16, "num_warps": 8 if n > 2048 else 4}


def partial_columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Narrow tiles, so that few columns are many programs."""
    if n <= SHORT:
        return {"TILE": 256, "WIDTH": 256, "UNROLL": n, "CHUNK": n, "num_warps": 2}
    return {"TILE": 2048, "WIDTH": 32, "UNROLL": 2, "CHUNK": 1024, "num_warps": 4}


# of rows and of columns
FIRST = (
    Configurations(__file__, "rows", rows_heuristic, rows_candidates),
    Configurations(__file__, "columns", columns_heuristic, columns_candidates),
)
# Partial results are few: there is nothing to measure, and what is measured for a first launch does not hold for them.
PARTIALS = (
    Configurations(__file__, "partial_rows", partials_heuristic),
    Configurations(__file__, "partial_columns", partial_columns_heuristic),
)


@dataclass(frozen=True)
class Tiling:
    """Tiles [rows, reach, cols], ``unroll`` of them one after the other along N, and how N is cut into parts."""

    rows: int
    reach: int
    cols: int
    unroll: int
    chunk: int
    num_warps: int
    flat: bool = False
    vector: int = 0  # elements of 16 bytes, where rows are read by vectors from the one on that they begin in
    apart: int = 1  # then: from one element of x to the next

    def blocks(self, v: AxisView) -> int:
        return triton.cdiv(v.M, self.rows) * triton.cdiv(v.K, self.cols)

    def parts(self, v: AxisView) -> int:
        return triton.cdiv(v.N, self.chunk)

    def grid(self, v: AxisView) -> tuple[int]:
        return (self.blocks(v) * self.parts(v),)

    def constants(self, v: AxisView, *others: AxisView) -> dict[str, Any]:
        tile = {"ROWS": self.rows, "REACH": self.reach, "COLS": self.cols, "UNROLL": self.unroll, "CHUNK": self.chunk}
        return {**tile, "ONCE": self.reach * self.unroll >= v.N, "UNIT": v.unit(*others), "DENSE": v.dense_axis}

    def balanced(self, v: AxisView) -> "Tiling":
        """Of columns in one part: about as many tiles in each step of few, so that none waits for memory for a few elements."""
        tiles = triton.cdiv(v.N, self.reach)
        if v.K == 1 or self.parts(v) > 1 or not self.unroll < tiles <= 4 * self.unroll:
            return self
        unroll = triton.cdiv(tiles, round(tiles / self.unroll))
        return replace(self, unroll=unroll, chunk=triton.cdiv(tiles, unroll) * unroll * self.reach)

    def in_parts(self, v: AxisView, length: int, few: int, device: torch.device) -> "Tiling":
        """Cuts N into parts of about ``length`` elements where there are more than ``few`` elements and too few programs."""
        step = self.reach * self.unroll
        whole = triton.cdiv(v.N, step) * step
        chunk = whole if v.elements <= few else min(triton.cdiv(max(length, step), step) * step, whole)
        if self.blocks(v) >= 16 * multiprocessors(device) and whole < 2**31:
            chunk = whole  # enough programs without cutting N
        elif v.elements >= MANY:
            parts = triton.cdiv(PROGRAMS * multiprocessors(device), self.blocks(v))
            chunk = min(chunk, triton.cdiv(v.N, parts * step) * step)
        return replace(self, chunk=chunk)


def tiling(v: AxisView, device: torch.device, dtype: torch.dtype, kinds: tuple[Configurations, ...] = FIRST) -> Tiling:
    """How a view is reduced, by the configurations for rows (K = 1) and for columns."""
    key = v.N if v.N <= SHORT else min(bucket(v.N), LONGEST)
    config = kinds[v.K > 1](device, dtype, key)
    warps, tile, length, few = config["num_warps"], config["TILE"], config.get("CHUNK", 0), FEW
    if INTERPRETING:  # it calls a reduction's function once an element; and small tensors are to be cut into parts too
        tile, length, few = min(tile, 256), min(length, 512), 1024
    if v.K == 1 and v.N <= SHORT:
        if config["WALK"]:
            return Tiling(min(tile, bucket(v.M)), 1, 1, v.N, v.N, warps)
        reach = bucket(v.N)
        flat = v.n == 1 and v.m == v.N == reach
        return Tiling(min(tile // reach, bucket(v.M)), reach, 1, 1, reach, warps, flat)
    unroll = config.get("UNROLL", 1)
    width = config.get("WIDTH", 1)
    cols = min(bucket(v.K), width if v.k < 2 else max(width, 256), tile)  # more of what is not side by side
    reach = 1 if v.N <= SHORT else min(bucket(v.N), tile // cols)
    rows = min(tile // (cols * reach), bucket(v.M)) if reach * unroll >= v.N else 1
    if reach >= v.N:
        unroll = 1
    return Tiling(rows, reach, cols, unroll, 0, warps).in_parts(v, length, few, device)


def vector_tiling(v: AxisView, x: Tensor) -> tuple[AxisView, Tiling] | None:
    """How rows are read of which x has every other element, or long ones that begin anywhere: by vectors that span them. None
    for other views."""
    size = x.element_size()
    vector = 16 // size
    begins = v.unit() * size  # bytes that divide where a row begins; 8 serve 16 bits as well
    loose = v.n == 1 and LOOSE.get(size, 2**31) <= v.N and (begins < 4 * size or not pointer_aligned(x))
    if v.K > 1 or v.M == 1 or v.N < 64 or v.N * v.n >= 2**31 - 2**16 or not (v.n == 2 or loose):
        return None
    apart, v = v.n, replace(v, N=(v.N - 1) * v.n + vector, n=1)
    lanes = vector * (4 if INTERPRETING else 32)  # elements of one vector of each lane
    if 8 * lanes >= v.N:
        reach = bucket(v.N)
        return v, Tiling(
            min(max(16 * lanes // reach, 1), bucket(v.M)), reach, 1, 1, reach, 1, vector=vector, apart=apart
        )
    warps = min(8, bucket(v.N) // (8 * lanes))
    vectors = triton.cdiv(v.N, lanes * warps)  # of a lane; many rows are read in steps of about 4
    unroll = triton.cdiv(vectors, max(round(vectors / 4), 1)) if 16 * multiprocessors(x.device) <= v.M else 2
    found = Tiling(1, lanes * warps, 1, unroll, 0, warps, vector=vector, apart=apart)
    return v, found.in_parts(v, 2**14, FEW, x.device)


# ---- launches of a reduction -----------------------------------------------------------------------------------------

SUM, LARGEST = (plus, sum_of_tile), (larger, largest_of_tile)


@dataclass(frozen=True)
class Formula:
    """What a reduction computes; ``map``, ``join``, ``finish``, ``gradient`` and ``tie`` are Triton functions."""

    map: Any  # an element's contribution
    join: tuple[Any, Any]  # of two, and of a tile
    finish: Any = as_is  # the result of the total
    neutral: float = 0.0  # what joins without effect
    other: float = 0.0  # the value of x that does not change the result
    compared: bool = False  # map takes the result of an earlier reduction too
    extremum: bool = False  # the gradient needs to know which elements equal the result, and nothing else of x
    gradient: Any = None  # (x, y, dy, ties) -> dx, where it needs x
    tie: Any = None  # (x, y) -> 1 for the elements that share a gradient; None where each has its own

    @property
    def of_partials(self) -> "Formula":
        """What joins the partial results of this one."""
        return Formula(itself, self.join, self.finish, self.neutral, self.neutral)


def reduce_launch(
    v: AxisView, t: Tiling, formula: Formula, finish: Any, divisor: float = 1.0, y: tuple[int, int] = (0, 0)
) -> Plan:
    scalars = (v.M, v.N, v.K, t.parts(v), v.m, v.n, v.k, *y, divisor)
    constants = {"MAP": formula.map, "COMBINE": formula.join[0], "FOLD": formula.join[1], "FINISH": finish}
    constants |= {"NEUTRAL": formula.neutral, "OTHER": formula.other, "COMPARED": formula.compared}
    constants |= {"FLAT": t.flat, "VECTOR": t.vector, "APART": t.apart, **t.constants(v)}
    return Plan(reduce_tiles, t.grid(v), scalars, constants, t.num_warps)


def partial_view(m: int, parts: int, k: int, *, total: bool = False) -> AxisView:
    """Partial results [m, parts, k], reduced along ``parts``, or altogether (``total``)."""
    if total:
        m, parts, k = 1, m * parts * k, 1
    return AxisView(m, parts, k, parts * k, k, 1) if k > 1 else AxisView(m, parts, 1, parts, 1, 0)


class ReducePlan:
    """The launches of one reduction: call with ``(x, out)``.

    A first launch writes a partial result for each part of N, in fp32; others join them until one is left. Nothing is
    added by atomics, so the order, and every bit of the result, is the same each time. ``total``: the results of the view's
    rows are joined too. ``x``: what the view is of, whose rows may begin anywhere in memory.
    """

    def __init__(
        self, v: AxisView, device: torch.device, dtype: torch.dtype, formula: Formula, divisor: float = 1.0, *,
        total: bool = False, kinds: tuple[Configurations, ...] = FIRST, x: Tensor | None = None,
    ):  # fmt: skip
        self.launches: list[Plan] = []
        self.partials: list[int] = []
        first = None if x is None else vector_tiling(v, x)
        while True:
            if first and not self.launches:
                v, t = first
            else:
                t = tiling(v, device, dtype, PARTIALS if self.launches else kinds).balanced(v)
            rest = partial_view(v.M, t.parts(v), v.K, total=total)
            last = rest.N == 1
            self.launches.append(reduce_launch(v, t, formula, formula.finish if last else as_is, divisor))
            if last:
                return
            self.partials.append(rest.elements)
            v, formula, dtype, total = rest, formula.of_partials, torch.float32, False

    def __call__(self, x: Tensor, out: Tensor) -> None:
        source = x
        for size, launch in zip(self.partials, self.launches, strict=False):
            partial = torch.empty(size, dtype=torch.float32, device=x.device)
            launch(source, source, partial)  # the second argument is y, which only formulas that compare read
            source = partial
        self.launches[-1](source, source, out)


# ---- launches of a gradient ------------------------------------------------------------------------------------------


def gradient_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    return {"TILE": 2048 if n <= 2048 else min(n, 4096), "num_warps": 4}


def gradient_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = tiles({"TILE": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)}, 4, 32)
    return [c for c in every if c["TILE"] >= min(n, 8192)]


GRADIENT = Configurations(__file__, "gradient", gradient_heuristic, gradient_candidates)
SPAN = 4096  # elements along N that are counted together


def gradient_tiling(v: AxisView, device: torch.device, dtype: torch.dtype) -> Tiling:
    config = GRADIENT(device, dtype, min(bucket(v.N), LONGEST))
    most = min(config["TILE"], 256) if INTERPRETING else config["TILE"]
    cols = min(bucket(v.K), 64 if v.N > 16 else 512, most)
    reach = min(bucket(v.N), most // cols)
    return Tiling(min(most // (cols * reach), bucket(v.M)), reach, cols, 1, reach, config["num_warps"])


class Spans:
    """N in spans of ``length`` elements, ``count`` of them, of which each has a partial result. ``total``: there is one result
    for all rows of the view."""

    def __init__(self, v: AxisView, device: torch.device, dtype: torch.dtype, *, total: bool):
        t, whole = gradient_tiling(v, device, dtype), tiling(v, device, dtype)
        most = max(SPAN // t.cols, t.reach)  # a span is to be short: the gradient reads all of it
        if whole.reach * whole.unroll > most:
            reach = min(whole.reach, most)
            whole = replace(whole, reach=reach, unroll=most // reach)
        step = math.lcm(whole.reach * whole.unroll, t.reach)
        self.length = triton.cdiv(max(SPAN // t.cols, step), step) * step
        self.count = triton.cdiv(v.N, self.length)
        self.v, self.device, self.total = v, device, total
        self.tiles = replace(whole, chunk=self.length, rows=1, flat=False)
        self.y = (0, 0) if total else (v.K, 1)  # strides of a result
        self.shape = (v.M, self.count, v.K)

    def first(self, formula: Formula) -> Plan:
        """The partial results of x: call with ``(x, y, partial)``."""
        return reduce_launch(self.v, self.tiles, formula, as_is, y=self.y if formula.compared else (0, 0))

    def rest(self, formula: Formula) -> ReducePlan:
        """The result of the partial ones: call with ``(partial, out)``."""
        every = partial_view(*self.shape, total=self.total)
        return ReducePlan(every, self.device, torch.float32, formula.of_partials, kinds=PARTIALS)


class GradientPlan:
    """The launches of the gradient of a norm: call with ``(x, y, dy, dx)``; y [M, K] is dense.

    Where a tile holds all of N, it counts its ties. Elsewhere a first reduction counts them in spans, a second adds those up,
    and x is read again only in the spans that have any: about one read of x and one write of dx in all.
    """

    def __init__(self, c: Any):
        (v, dx), x, formula, total = c.views, c.x, c.formula, c.dim is None
        t = gradient_tiling(v, x.device, x.dtype)
        in_a_tile = t.reach >= v.N and not (total and v.M * v.K > 1)  # all elements that share a result
        self.spans: Spans | None = None
        if formula.tie is not None and not in_a_tile:
            self.spans = Spans(v, x.device, x.dtype, total=total)
            ties = Formula(formula.tie, SUM, compared=True)
            self.hits, self.ties = self.spans.first(ties), self.spans.rest(ties)
        span, count = (self.spans.length, self.spans.count) if self.spans else (t.reach, 1)
        y = (0, 0) if total else (v.K, 1)
        scalars = (v.M, v.N, v.K, t.parts(v), count, v.m, v.n, v.k, *y, *c.strides, dx.m, dx.n, dx.k)
        ways = 0 if formula.tie is None else 1 if in_a_tile else 2
        constants = {"F": formula.gradient, "TIE": formula.tie, "COUNT": ways, "SPAN": span}
        constants |= {"ROWS": t.rows, "REACH": t.reach, "COLS": t.cols, "UNIT": v.unit(dx), "DENSE": v.dense_axis}
        self.results = v.M * v.K
        self.gradient = Plan(gradient_tiles, t.grid(v), scalars, constants, t.num_warps)

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
        hits = ties = y
        if self.spans is not None:
            hits = torch.empty(math.prod(self.spans.shape), dtype=torch.float32, device=x.device)
            ties = torch.empty(self.results, dtype=torch.float32, device=x.device)
            self.hits(x, y, hits)
            self.ties(hits, ties)
        self.gradient(x, y, dy, ties, hits, dx)
