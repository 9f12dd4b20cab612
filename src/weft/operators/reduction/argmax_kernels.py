"""The Triton kernel of ``argmax``, over a view [M, N, K] of a tensor along N.

A place beside every value costs a dozen instructions an element, which is more than memory leaves time for. So the maximum
is taken of groups of elements that follow each other, one instruction an element; a place is kept of a group, and the element
is looked up once, in the group that has won.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.reduction.kernels import known_strides, larger, place

FAR = tl.constexpr(2147483647)  # a place behind every other


@triton.jit
def above(a, b):
    """NaN is above all else, and not above itself."""
    return (a > b) | ((a != a) & (b == b))


@triton.jit
def first_place(x, top, places):
    """The lowest place, along axis 1, of those x [ROWS, any, COLS] that are their maximum, top [ROWS, COLS]. Where an x is NaN
    the maximum is."""
    return tl.min(tl.where((x == top[:, None, :]) | (x != x), places, FAR), axis=1)


@triton.jit
def read(lane, apart, u, inside, n, left, REACH: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr):
    """The tile u of a step; -inf outside."""
    if not WHOLE:
        inside = inside & (n + (u if GROUP == 0 else u * REACH) < left)
    return tl.load(lane + u * apart, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def searched(
    best, found, lane, apart, inside, n, start, left,
    REACH: tl.constexpr, UNROLL: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The best of each thread's groups, and where they start, after a step more, which starts at ``start``."""
    if GROUP == 0:
        top = read(lane, apart, 0, inside, n, left, REACH, GROUP, WHOLE)
        for u in tl.static_range(1, UNROLL):
            top = larger(top, read(lane, apart, u, inside, n, left, REACH, GROUP, WHOLE))
        found = tl.where(above(top, best), start, found)
        best = larger(best, top)
    else:
        for u in tl.static_range(UNROLL):
            top = read(lane, apart, u, inside, n, left, REACH, GROUP, WHOLE)
            if GROUP > 1:
                top = tl.reduce(tl.reshape(top, [top.shape[0], REACH // GROUP, GROUP, top.shape[2]]), 2, larger)
            found = tl.where(above(top, best), start + u * REACH, found)
            best = larger(best, top)
    return best, found


@triton.jit
def argmax_tiles(
    x_ptr, from_ptr, value_ptr, place_ptr, M, N, K, PARTS, x_m, x_n, x_k, row_places,
    LAST: tl.constexpr, GATHER: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, UNROLL: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, ONCE: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """place[m, part, k] = the lowest n at which x[m, n, k] is largest, plus m * row_places; value[m, part, k] = that x
    (not written by the LAST launch).

    GROUP elements that follow each other along N have one place until the end: of a row those that a thread loads at once, so
    that a step is UNROLL tiles one behind the other; 0 for columns, where UNROLL loads are a group, and the REACH groups of a
    step lie one behind the other. What is outside is -inf, and behind all that is inside, so it never comes first.

    With GATHER x are the values of an earlier launch and from[m, n, k] their places: the result is a place of those.
    """
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    row, part, col = place(K, PARTS, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None, None]
    n = tl.arange(0, REACH)[None, :, None]
    k = tl.arange(0, COLS)[None, None, :]
    there = (m < M - row) & (k < K - col)
    first = part * CHUNK
    x_ptr += row * x_m + first * x_n + col * x_k
    across = m.to(tl.int64) * x_m + k.to(tl.int64) * x_k
    if ONCE and UNROLL == 1:  # all of it is in registers
        x = tl.load(x_ptr + across + n.to(tl.int64) * x_n, mask=there & (n < N), other=-float("inf")).to(tl.float32)
        top = tl.reduce(x, 1, larger)
        found = first_place(x, top, n)
    elif ONCE and REACH == 1:  # a thread has all of it, one element after the other
        top = tl.full([ROWS, 1, COLS], -float("inf"), tl.float32)
        found = tl.full([ROWS, 1, COLS], 0, tl.int32)
        for u in tl.static_range(UNROLL):
            x = tl.load(x_ptr + u * x_n + across, mask=there & (u < N), other=-float("inf")).to(tl.float32)
            found = tl.where(above(x, top), u, found)
            top = larger(top, x)
        top, found = tl.reshape(top, [ROWS, COLS]), tl.reshape(found, [ROWS, COLS])
    else:
        GROUPS: tl.constexpr = REACH // GROUP if GROUP > 0 else REACH
        LENGTH: tl.constexpr = GROUP if GROUP > 0 else UNROLL
        best = tl.full([ROWS, GROUPS, COLS], -float("inf"), tl.float32)
        found = tl.full([ROWS, GROUPS, COLS], 0, tl.int32)  # the tile in which best was, without the place in it
        n *= 1 if GROUP > 0 else UNROLL
        apart = tl.full((), REACH if GROUP > 0 else 1, tl.int64) * x_n
        lane = x_ptr + across + n.to(tl.int64) * x_n
        start, left = 0, N - first
        if not ONCE:
            for _ in range(0, (tl.minimum(left, CHUNK) // (REACH * UNROLL)).to(tl.int32)):
                best, found = searched(best, found, lane, apart, there, n, start, left, REACH, UNROLL, GROUP, True)
                lane += tl.full((), REACH * UNROLL, tl.int64) * x_n
                start += REACH * UNROLL
        if ONCE or start < tl.minimum(left, CHUNK):
            best, found = searched(best, found, lane, apart, there, n, start, left - start, REACH, UNROLL, GROUP, False)
        top = tl.reduce(best, 1, larger)
        found = first_place(best, top, found + tl.arange(0, GROUPS)[None, :, None] * LENGTH)
        if LENGTH > 1:
            at = found[:, None, :] + tl.arange(0, LENGTH)[None, :, None]
            inside = there & (at < left)
            x = tl.load(x_ptr + across + at.to(tl.int64) * x_n, mask=inside, other=-float("inf")).to(tl.float32)
            found = first_place(x, top, at)
    m = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, COLS)[None, :]
    there = (m < M - row) & (k < K - col)
    out = ((row + m) * PARTS + part) * K + col + k
    if GATHER:
        result = tl.load(from_ptr + ((row + m) * N + first + found) * K + col + k, mask=there)
    else:
        result = first + found + (row + m) * row_places
    tl.store(place_ptr + out, result, mask=there)
    if not LAST:
        tl.store(value_ptr + out, top, mask=there)
