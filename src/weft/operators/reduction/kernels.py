"""The Triton kernels of all reductions, over a view [M, N, K] of a tensor along N.

M is whatever lies before the reduced axis, K what lies after it; a reduction over everything is M = K = 1. One program
reduces a tile [ROWS, REACH, COLS]: lane by lane while it walks along N, across lanes once at the end, so an element costs
one operation and a result a few shuffles. The order depends on shapes only, never on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ---- formulas: MAP says what an element counts for, COMBINE joins two, FOLD all of a tile along its axis 1, FINISH turns the
# ---- total into the result


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
def equal(x, y):
    return (x == y).to(tl.float32)


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
def added(tile):
    return tl.sum(tile, axis=1)


@triton.jit
def largest(tile):
    return tl.reduce(tile, 1, larger)


@triton.jit
def keep(total, n):
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
def place(K, PARTS, ROWS: tl.constexpr, COLS: tl.constexpr):
    """This program's first row, its part of N and its first column. Columns vary fastest: neighbouring programs read
    neighbouring memory. In int64: tensors may hold more than 2**31 elements."""
    program = tl.program_id(0)
    blocks = tl.cdiv(K, COLS)
    part = program // blocks % PARTS
    return (program // blocks // PARTS).to(tl.int64) * ROWS, part.to(tl.int64), (program % blocks).to(tl.int64) * COLS


@triton.jit
def known_multiple(value, UNIT: tl.constexpr):
    """The same value, of which the compiler then knows that UNIT divides it: what 16-byte accesses need. Triton itself
    finds out about multiples of 16 only."""
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
    OTHER: tl.constexpr, COMPARED: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, UNROLL: tl.constexpr,
    CHUNK: tl.constexpr, ONCE: tl.constexpr, FLAT: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """out[m, part, k] = FINISH(COMBINE over n of MAP(x[m, n, k], y[m, k]), divisor), n from the CHUNK of that part.

    x and y have any strides (y is read if COMPARED); out [M, PARTS, K] is dense. OTHER stands for what is outside: the
    value of x that counts for nothing. ONCE: one step covers N. FLAT: rows are dense powers of two, so a tile is one
    stretch of memory; it is loaded as such and folded in registers.
    """
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    row, part, col = place(K, PARTS, ROWS, COLS)
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


# ---- gradients that need x -------------------------------------------------------------------------------------------


# Of y, dy and ties there is one a result, [ROWS, 1, COLS]: what depends on them alone, a division say, costs nothing.


@triton.jit
def share_of_maximum(x, y, dy, ties):
    """The bits of PyTorch's ``dy * (x == y) / ties``; 0 / 0 is NaN where the maximum is."""
    return tl.where(x == y, tl.div_rn(dy, ties), tl.div_rn(dy * 0.0, ties))


@triton.jit
def share_of_magnitude(x, y, dy, ties):
    share = tl.div_rn(dy, ties)
    return sign(x) * tl.where((tl.abs(x) == y) | (x != x), share, share * 0.0)


@triton.jit
def direction(x, y, dy, ties):
    """dy * x / y, and 0 where y is. A root of squares is no denormal number, so its reciprocal is finite."""
    return x * tl.where(y == 0, 0.0, tl.div_rn(1.0, y)) * dy


@triton.jit
def signed(x, y, dy, ties):
    return sign(x) * dy


@triton.jit
def sign(x):
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def spread_tiles(
    x_ptr, y_ptr, dy_ptr, ties_ptr, hits_ptr, dx_ptr, M, N, K, PARTS, HITS, x_m, x_n, x_k, y_m, y_k, dy_m, dy_k,
    dx_m, dx_n, dx_k,
    F: tl.constexpr, TIE: tl.constexpr, UNSEEN: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dx[m, n, k] = F(x[m, n, k], y[m, k], dy[m, k], ties[m, k]); ties have the strides of y.

    COUNT 0: F needs no ties. 1: a tile holds all of N, and counts those for which TIE(x, y) is 1. 2: they were counted,
    and hits [M, HITS, K] says how many lie in each SPAN of n: where there are none, x is not read again but taken as
    UNSEEN, which ties with no y that has no hit there.
    """
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    _, _, dx_m, dx_n, dx_k = known_strides(N, K, dx_m, dx_n, dx_k, UNIT, DENSE)
    row, part, col = place(K, PARTS, ROWS, COLS)
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
    x = tl.load(x_ptr, mask=wanted, other=UNSEEN, eviction_policy="evict_last")  # the hint: softmax/README.md
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
