"""The Triton kernels of all scans over a view [M, N, K] of a tensor along N, and their launches.

M is what lies before the scanned axis, K what lies after it. ``scan_tiles`` walks along N with a carry and takes every view;
``scan_long_rows`` scans rows that are long and few in one pass over memory, by decoupled look-back. An exclusive scan is an
inclusive one of the input shifted by one element, and a reversed one runs from the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.axis_view import AxisView
from weft.operators.configs import Config, Configurations, bucket, tiles
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.reduction.kernels import known_strides, larger, tile_of_program

# ---- formulas: SCAN along axis 1, TOTAL of axis 1, JOIN of two results -----------------------------------------------


@triton.jit
def running_sum(tile):
    return tl.cumsum(tile, axis=1)


@triton.jit
def total_sum(tile):
    return tl.sum(tile, axis=1)


@triton.jit
def running_product(tile):
    return tl.cumprod(tile, axis=1)


@triton.jit
def total_product(tile):
    return tl.reduce(tile, 1, times)


@triton.jit
def times(a, b):
    return a * b


@triton.jit
def join_exponentials(top_a, sum_a, top_b, sum_b):
    """Of two sums of exponentials, each a pair (m, s) that means s * exp(m). One exponential a pair."""
    top = tl.maximum(top_a, top_b, propagate_nan=tl.PropagateNan.ALL)
    smaller = tl.exp(-tl.abs(tl.where(top_a == top_b, 0.0, top_a - top_b)))  # equal: also both infinite
    return top, tl.where(top_a < top_b, sum_a * smaller + sum_b, sum_a + sum_b * smaller)


@triton.jit
def running_logsumexp(tile):
    ones = tl.full(tile.shape, 1.0, tl.float32)
    top, total = tl.associative_scan((tile, ones), 1, join_exponentials)
    return top + tl.log(total)


@triton.jit
def total_logsumexp(tile):
    top = tl.reduce(tile, 1, larger)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.sum(tl.exp(tile - base[:, None]), axis=1)
    return tl.where(tl.abs(top) == float("inf"), top, top + tl.log(total))


@triton.jit
def log_plus(a, b):
    top, total = join_exponentials(a, 1.0, b, 1.0)
    return top + tl.log(total)


@triton.jit
def scaled(product, power):
    """``product * 2**power`` with a product between 1 and 2, or what has no such: 0, less than 2**-126, infinity, NaN."""
    bits = product.to(tl.int32, bitcast=True)
    field = (bits >> 23) & 0xFF
    normal = (field > 0) & (field < 0xFF)
    mantissa = ((bits & ~0x7F800000) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(normal, mantissa, product), power + tl.where(normal, field - 127, 0).to(tl.float32)


@triton.jit
def times_scaled(a, power_a, b, power_b):
    return scaled(a * b, power_a + power_b)


@triton.jit
def power_of_two(exponent):
    """From 2**-126 to 2**127."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


# ---- the order of a tile ---------------------------------------------------------------------------------------------


@triton.jit
def offsets(REACH: tl.constexpr, REVERSE: tl.constexpr, VECTOR: tl.constexpr):
    """The offsets of a tile's elements along N, in the order of the scan, [1, REACH, 1].

    A reversed scan along a dense axis takes its 16-byte accesses backwards, [1, REACH / VECTOR, VECTOR], and their elements
    forwards until ``in_order`` reverses them, which only renames registers. Triton's own reversed scan costs ten shuffles an
    element, and descending addresses make accesses of one element.
    """
    if VECTOR > 1:
        vector = REACH // VECTOR - 1 - tl.arange(0, REACH // VECTOR)[None, :, None]
        return vector * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    elif REVERSE:
        return REACH - 1 - tl.arange(0, REACH)[None, :, None]
    else:
        return tl.arange(0, REACH)[None, :, None]


@triton.jit
def in_order(tile, ROWS: tl.constexpr, REACH: tl.constexpr, VECTOR: tl.constexpr):
    """From the shape of ``offsets`` to [ROWS, REACH, COLS] in the order of the scan."""
    if VECTOR > 1:
        return tl.reshape(tl.flip(tile, 2), [ROWS, REACH, 1])
    else:
        return tile


@triton.jit
def in_memory(tile, ROWS: tl.constexpr, REACH: tl.constexpr, VECTOR: tl.constexpr):
    """The inverse of ``in_order``."""
    if VECTOR > 1:
        return tl.flip(tl.reshape(tile, [ROWS, REACH // VECTOR, VECTOR]), 2)
    else:
        return tile


# ---- scans -----------------------------------------------------------------------------------------------------------


@triton.jit
def scan_tiles(
    x_ptr, carry_ptr, y_ptr, totals_ptr, M, N, K, PARTS, x_m, x_n, x_k, y_m, y_n, y_k,
    SCAN: tl.constexpr, TOTAL: tl.constexpr, JOIN: tl.constexpr, NEUTRAL: tl.constexpr,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, TOTALS: tl.constexpr, CARRIED: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, ONCE: tl.constexpr,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """y[m, n, k] = x[m, 0, k] + … + x[m, n - SHIFT, k], with the formula's operation for +.

    One program walks a tile [ROWS, REACH, COLS] along the CHUNK of its part, and asks for the next tile before it works on
    this one. Where N is cut into several parts, a first launch writes only the TOTALS of each, [M, PARTS, K] (SCALED: and
    behind them their powers of two), and the last one starts from what comes before its part: carry [M, PARTS, K].
    """
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    _, _, y_m, y_n, y_k = known_strides(N, K, y_m, y_n, y_k, UNIT, DENSE)
    row, part, col = tile_of_program(K, PARTS, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None, None]
    n = offsets(REACH, REVERSE, VECTOR)
    k = tl.arange(0, COLS)[None, None, :]
    there = (m < M - row) & (k < K - col)
    x_ptr += row * x_m + col * x_k
    y_ptr += row * y_m + col * y_k
    from_lane = m.to(tl.int64) * x_m + n.to(tl.int64) * x_n + k.to(tl.int64) * x_k
    to_lane = m.to(tl.int64) * y_m + n.to(tl.int64) * y_n + k.to(tl.int64) * y_k
    first = part * CHUNK
    tiles = tl.cdiv(tl.minimum(N - first, CHUNK), REACH).to(tl.int32)
    at = first
    if REVERSE:
        at += (tiles - 1) * REACH
    m2 = tl.arange(0, ROWS)[:, None]
    k2 = tl.arange(0, COLS)[None, :]
    carry = tl.full([ROWS, COLS], NEUTRAL, tl.float32)
    beside = ((row + m2) * PARTS + part) * K + col + k2  # this program's element of [M, PARTS, K]
    in_beside = (m2 < M - row) & (k2 < K - col)
    if CARRIED:
        carry = tl.load(carry_ptr + beside, mask=in_beside, other=NEUTRAL)
    power = tl.zeros([ROWS, COLS], tl.float32)
    x = in_order(shifted_load(x_ptr, from_lane, at, n, x_n, N, there, NEUTRAL, SHIFT), ROWS, REACH, VECTOR)
    if ONCE:  # one tile is all of N
        y = in_memory(SCAN(x), ROWS, REACH, VECTOR)
        tl.store(y_ptr + at * y_n + to_lane, y.to(y_ptr.dtype.element_ty), mask=there & (n < N - at))
    else:
        for _ in range(0, tiles):
            following = at - REACH if REVERSE else at + REACH
            wanted = there & (following >= first) & (following < first + CHUNK)
            ahead = shifted_load(x_ptr, from_lane, following, n, x_n, N, wanted, NEUTRAL, SHIFT)
            if not TOTALS:
                y = in_memory(JOIN(carry[:, None, :], SCAN(x)), ROWS, REACH, VECTOR)
                tl.store(y_ptr + at * y_n + to_lane, y.to(y_ptr.dtype.element_ty), mask=there & (n < N - at))
            carry = JOIN(carry, TOTAL(x))
            if SCALED:
                carry, power = scaled(carry, power)
            x = in_order(ahead, ROWS, REACH, VECTOR)
            at = following
    if TOTALS:
        tl.store(totals_ptr + beside, carry, mask=in_beside)
        if SCALED:
            tl.store(totals_ptr + tl.cast(M, tl.int64) * PARTS * K + beside, power, mask=in_beside)


@triton.jit
def shifted_load(ptr, lane, at, n, stride, N, there, NEUTRAL: tl.constexpr, SHIFT: tl.constexpr):
    """The elements SHIFT before those from ``at`` on; NEUTRAL where there are none."""
    inside = there & (n < N - at)
    if SHIFT == 1:
        inside &= at + n > 0
    if SHIFT == -1:
        inside &= n < N - at - 1
    at = at - SHIFT
    return tl.load(ptr + at * stride + lane, mask=inside, other=NEUTRAL, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def packed(value):
    """A word of a flag and a value, so that one load brings both."""
    return (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)


@triton.jit
def unpacked(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def poll(words_ptr, COUNT, GROUP: tl.constexpr):
    """The first COUNT of GROUP words, each published or not yet; the others count as published."""
    j = tl.arange(0, GROUP)
    return tl.load(words_ptr + j, mask=j < COUNT, other=1 << 32, volatile=True)


@triton.jit
def total_of(words, words_ptr, COUNT, TOTAL: tl.constexpr, NEUTRAL: tl.constexpr, GROUP: tl.constexpr):
    """The total of the first COUNT words, joined as a tree once all are published."""
    while tl.min(words >> 32, axis=0) == 0:
        words = poll(words_ptr, COUNT, GROUP)
    values = tl.where(tl.arange(0, GROUP) < COUNT, unpacked(words), NEUTRAL)
    return tl.sum(tl.reshape(TOTAL(tl.reshape(values, [1, GROUP, 1])), [1]), axis=0)


@triton.jit
def scan_long_rows(
    x_ptr, state_ptr, y_ptr, N, TILES, x_m, x_n, y_m, y_n,
    SCAN: tl.constexpr, TOTAL: tl.constexpr, JOIN: tl.constexpr, NEUTRAL: tl.constexpr,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The same for rows [M, N] in one pass over memory: each program scans one tile and looks back for what comes before.

    Decoupled look-back (Merrill & Garland 2016), with one change: theirs adds what predecessors have published so far, so its
    rounding depends on timing. Here GROUP tiles form a group and GROUP groups a stretch, and a tile always
    adds the totals of the tiles before it in its group, as one tree, to those of the groups before that in its stretch, to what
    comes before the stretch: the same bits every time. The chain from stretch to stretch is GROUP² times shorter than from
    tile to tile.

    state, zeroed int64: [0] counts programs in the order in which they start, so that a program waits only for others that
    have started; then, of each row, a word for the total of each tile and of each group, and one for what comes before each
    stretch (``packed``).
    """
    groups = tl.cdiv(TILES, GROUP)
    ticket = tl.atomic_add(state_ptr, 1, sem="relaxed").to(tl.int32)
    row = (ticket // TILES).to(tl.int64)
    i = (ticket % TILES).to(tl.int64)
    at = (TILES - 1 - i if REVERSE else i) * BLOCK
    n = offsets(BLOCK, REVERSE, VECTOR)
    x_ptr += row * x_m
    y_ptr += row * y_m
    x = shifted_load(x_ptr, n.to(tl.int64) * x_n, at, n, x_n, N, n >= 0, NEUTRAL, SHIFT)
    x = in_order(x, 1, BLOCK, VECTOR)
    group, rank = i // GROUP, i % GROUP
    stretch, group_rank = group // GROUP, group % GROUP
    totals_ptr = state_ptr + 1 + row * (TILES + groups + tl.cdiv(groups, GROUP))
    groups_ptr = totals_ptr + TILES
    prefix_ptr = groups_ptr + groups + stretch
    totals_ptr += group * GROUP
    groups_ptr += stretch * GROUP
    total = tl.sum(tl.reshape(TOTAL(x), [1]), axis=0)  # of one row: the total itself
    tl.atomic_xchg(totals_ptr + rank, packed(total), sem="relaxed")
    near = poll(totals_ptr, rank, GROUP)
    far = poll(groups_ptr, group_rank, GROUP)
    y = SCAN(x)
    prefix = total_of(near, totals_ptr, rank, TOTAL, NEUTRAL, GROUP)
    if rank == GROUP - 1:
        tl.atomic_xchg(groups_ptr + group_rank, packed(JOIN(prefix, total)), sem="relaxed")
    prefix = JOIN(total_of(far, groups_ptr, group_rank, TOTAL, NEUTRAL, GROUP), prefix)
    if stretch > 0:
        word = tl.load(prefix_ptr, volatile=True)
        while word == 0:
            word = tl.load(prefix_ptr, volatile=True)
        prefix = JOIN(unpacked(word), prefix)
    if (rank == GROUP - 1) & (group_rank == GROUP - 1) & (i + 1 < TILES):
        tl.atomic_xchg(prefix_ptr + 1, packed(JOIN(prefix, total)), sem="relaxed")
    y = in_memory(JOIN(prefix, y), 1, BLOCK, VECTOR)
    tl.store(y_ptr + at * y_n + n.to(tl.int64) * y_n, y.to(y_ptr.dtype.element_ty), mask=n < N - at)


# ---- gradients of products and of sums of exponentials ---------------------------------------------------------------


@triton.jit
def then(a, b, c, d):
    """r -> a * r + b, followed by r -> c * r + d."""
    return a * c, b * c + d


@triton.jit
def then_finite(a, b, c, d):
    """The same where factors may overflow together: their product stays finite."""
    LARGEST: tl.constexpr = 3.402823466e38
    return tl.clamp(a * c, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL), b * c + d


@triton.jit
def load_or(ptr, lane, stride, at, n, N, there, OTHER: tl.constexpr):
    """Element at + n, OTHER where there is none."""
    inside = there & (at + n >= 0) & (n < N - at)
    return tl.load(ptr + at * stride + lane, mask=inside, other=OTHER, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def gradient_tiles(
    x_ptr, y_ptr, dy_ptr, carry_ptr, totals_ptr, scales_ptr, dx_ptr, M, N, K, PARTS,
    x_m, x_n, x_k, y_m, y_n, y_k, dy_m, dy_n, dy_k, dx_m, dx_n, dx_k,
    LOG: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, TOTALS: tl.constexpr, CARRIED: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The gradient of a running product (or, LOG, of the log of a running sum of exponentials).

    Both are a factor times a linear recurrence from the other end, r[j] = dy[j] + a[j] * r[j + 1]:

        product      dx[j] = y[j - 1] * r[j]           with a[j] = x[j + 1]
        logsumexp    dx[j] = exp(x[j] - y[j]) * r[j]   with a[j] = exp(y[j] - y[j + 1]) <= 1

    so nothing is divided and zeros need no case of their own. REVERSE is the direction of the recurrence. Exclusive scans
    (SHIFT = 1) take dy, and y, one element on.
    """
    STEP: tl.constexpr = 1 if REVERSE else -1  # towards the end that the recurrence starts from
    row, part, col = tile_of_program(K, PARTS, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None, None]
    n = offsets(REACH, REVERSE, VECTOR)
    k = tl.arange(0, COLS)[None, None, :]
    there = (m < M - row) & (k < K - col)
    x_ptr += row * x_m + col * x_k
    y_ptr += row * y_m + col * y_k
    dy_ptr += row * dy_m + col * dy_k
    dx_ptr += row * dx_m + col * dx_k
    x_lane = m.to(tl.int64) * x_m + n.to(tl.int64) * x_n + k.to(tl.int64) * x_k
    y_lane = m.to(tl.int64) * y_m + n.to(tl.int64) * y_n + k.to(tl.int64) * y_k
    dy_lane = m.to(tl.int64) * dy_m + n.to(tl.int64) * dy_n + k.to(tl.int64) * dy_k
    dx_lane = m.to(tl.int64) * dx_m + n.to(tl.int64) * dx_n + k.to(tl.int64) * dx_k
    m2 = tl.arange(0, ROWS)[:, None]
    k2 = tl.arange(0, COLS)[None, :]
    beside = ((row + m2) * PARTS + part) * K + col + k2
    in_beside = (m2 < M - row) & (k2 < K - col)
    scale = tl.full([ROWS, COLS], 1.0, tl.float32)  # of this part: r before it -> scale * r + carry
    carry = tl.zeros([ROWS, COLS], tl.float32)
    if CARRIED:
        carry = tl.load(carry_ptr + beside, mask=in_beside, other=0.0)
    first = part * CHUNK
    tiles = tl.cdiv(tl.minimum(N - first, CHUNK), REACH).to(tl.int32)
    at = first
    if REVERSE:
        at += (tiles - 1) * REACH
    last = tl.arange(0, REACH)[None, :, None] == REACH - 1
    for _ in range(0, tiles):
        inside = there & (n < N - at)
        b = load_or(dy_ptr, dy_lane, dy_n, at + STEP * SHIFT, n, N, inside, 0.0)
        if LOG:
            near = load_or(y_ptr, y_lane, y_n, at + STEP * SHIFT, n, N, inside, float("inf"))
            far = load_or(y_ptr, y_lane, y_n, at + STEP * (SHIFT + 1), n, N, inside, float("inf"))
            a = tl.where(near == far, 1.0, tl.exp(near - far))
        else:
            a = load_or(x_ptr, x_lane, x_n, at + STEP, n, N, inside, 1.0)
        a = tl.where(inside, a, 1.0)
        a, b = in_order(a, ROWS, REACH, VECTOR), in_order(b, ROWS, REACH, VECTOR)
        a, b = tl.associative_scan((a, b), 1, then)
        r = b + a * carry[:, None, :]
        following = tl.sum(tl.where(last, r, 0.0), axis=1)
        scale *= tl.sum(tl.where(last, a, 0.0), axis=1)
        if not TOTALS:
            r = in_memory(r, ROWS, REACH, VECTOR)
            if LOG:
                x = load_or(x_ptr, x_lane, x_n, at, n, N, inside, 0.0)
                dx = tl.exp(x - near) * r
            else:
                dx = load_or(y_ptr, y_lane, y_n, at + STEP * (SHIFT - 1), n, N, inside, 1.0) * r
            tl.store(dx_ptr + at * dx_n + dx_lane, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        carry = following
        at += -REACH if REVERSE else REACH
    if TOTALS:
        tl.store(totals_ptr + beside, carry, mask=in_beside)
        tl.store(scales_ptr + beside, scale, mask=in_beside)


@triton.jit
def carry_products(total_ptr, carry_ptr, K, PARTS, LANES, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """carry[m, part, k] = the product of all before that part, from the [2, M, PARTS, K] totals of the parts and their powers
    of two, with which no product of finite factors overflows beside a 0. One program takes one of the LANES (m, k)."""
    lane = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    before = p + (1 if REVERSE else -1)
    inside = (before >= 0) & (before < PARTS) & (p < PARTS)
    at = (lane // K * PARTS + before) * K + lane % K
    total = tl.load(total_ptr + at, mask=inside, other=1.0)
    power = tl.load(total_ptr + tl.cast(LANES, tl.int64) * PARTS + at, mask=inside, other=0.0)
    total, power = tl.associative_scan((total, power), 0, times_scaled, reverse=REVERSE)
    power = tl.minimum(tl.maximum(power, -300.0), 300.0)  # from there on nothing is left, or all is infinite
    third = tl.floor(power / 3)
    carry = total * power_of_two(third) * power_of_two(third) * power_of_two(power - 2 * third)
    tl.store(carry_ptr + (lane // K * PARTS + p) * K + lane % K, carry, mask=p < PARTS)


@triton.jit
def carry_parts(total_ptr, scale_ptr, carry_ptr, K, PARTS, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """carry[m, part, k] = the recurrence's value before that part, from the [M, PARTS, K] totals and scales of the
    parts. One program takes one m and k."""
    lane = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK)
    STEP: tl.constexpr = 1 if REVERSE else -1
    before = p + STEP  # the part from which this one's carry comes
    inside = (before >= 0) & (before < PARTS) & (p < PARTS)
    at = (lane // K * PARTS + before) * K + lane % K
    b = tl.load(total_ptr + at, mask=inside, other=0.0)
    a = tl.load(scale_ptr + at, mask=inside, other=1.0)  # finite
    a, b = tl.associative_scan((a, b), 0, then_finite, reverse=REVERSE)
    tl.store(carry_ptr + (lane // K * PARTS + p) * K + lane % K, b, mask=p < PARTS)


# ---- what a scan computes, and its configurations --------------------------------------------------------------------

MOST_PARTS = 1024
LONGEST = 2**16  # extents beyond are configured alike


def rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Whole rows in one tile: about 16 elements a thread."""
    tile = max(2048, n)
    return {"TILE": tile, "num_warps": min(max(tile // 512, 4), 16)}


def rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = tiles({"TILE": (512, 1024, 2048, 4096, 8192, 16384), "num_warps": (1, 2, 4, 8, 16, 32)}, 4, 32)
    return [c for c in every if n <= c["TILE"] <= max(n, 4096)]


def columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    return {"TILE": 2048, "WIDTH": 32 if dtype == torch.float32 else 64, "num_warps": 4}


COLUMNS = {"TILE": (1024, 2048, 4096, 8192), "WIDTH": (16, 32, 64, 128, 256), "num_warps": (1, 2, 4, 8)}
LONG = {"BLOCK": (2048, 4096, 8192, 16384), "GROUP": (32, 64, 128), "num_warps": (4, 8, 16)}
GRADIENT = {"TILE": (1024, 2048, 4096), "WIDTH": (16, 32, 64, 128), "num_warps": (2, 4, 8)}


class Formula:
    """What a scan computes, with the configurations of its kernels: registers and arithmetic differ by formula.

    Args:
        name: of the operator.
        scan, total, join: Triton functions: of a tile along its axis 1 all results, and the last one; of two results.
        neutral: what joins without effect.
        scaled: totals of parts are products beside powers of two.
    """

    def __init__(self, name: str, scan: Any, total: Any, join: Any, neutral: float, *, scaled: bool = False):
        self.constants = {"SCAN": scan, "TOTAL": total, "JOIN": join, "NEUTRAL": neutral}
        self.neutral, self.scaled = neutral, scaled
        long, gradient = {"BLOCK": 8192, "GROUP": 64, "num_warps": 8}, {"TILE": 1024, "WIDTH": 64, "num_warps": 4}
        self.rows = Configurations(__file__, f"{name}_rows", rows_heuristic, rows_candidates)
        self.columns = Configurations(__file__, f"{name}_columns", columns_heuristic, tiles(COLUMNS, 8, 32))
        self.long_rows = Configurations(__file__, f"{name}_long_rows", long, tiles(LONG, 8, 32, of=("BLOCK",)))
        self.gradient = Configurations(__file__, f"{name}_gradient", gradient, tiles(GRADIENT, 4, 16))


class Tiling:
    """Tiles [rows, reach, cols] that walk along N, of which each program takes ``chunk``. ``cut``: N may be cut into parts, so
    that there are programs enough."""

    def __init__(self, v: AxisView, config: Config, device: torch.device, *, cut: bool):
        most = min(config["TILE"], 256) if INTERPRETING else config["TILE"]
        cols = min(bucket(v.K), config.get("WIDTH", 1), most)
        reach = min(bucket(v.N), most // cols)
        rows = min(most // (cols * reach), bucket(v.M)) if reach >= v.N else 1
        whole = triton.cdiv(v.N, reach) * reach
        blocks = triton.cdiv(v.M, rows) * triton.cdiv(v.K, cols)
        few = cut and blocks < multiprocessors(device)
        parts = min(4 * multiprocessors(device) // blocks, whole // (4 * reach), MOST_PARTS) if few else 1
        self.reach, self.chunk = reach, triton.cdiv(triton.cdiv(v.N, max(parts, 1)), reach) * reach
        self.parts, self.num_warps = triton.cdiv(v.N, self.chunk), config["num_warps"]
        self.grid = (blocks * self.parts,)
        self.constants = {"ROWS": rows, "REACH": reach, "COLS": cols, "CHUNK": self.chunk}


def vector(v: AxisView, x: Tensor, reach: int, reverse: bool) -> int:
    """Elements of an access that a tile has to reverse (``offsets``); 1 where it has none to reverse."""
    most = 2 if INTERPRETING else 16 // x.element_size()
    return min(most, reach) if reverse and v.K == 1 and v.n == 1 else 1


def carry_products_launch(v: AxisView, parts: int, reverse: bool = False) -> Plan:
    """From the totals of so many parts of each column of [M, N, K], beside powers of two, to the products before them.
    Args: reverse: parts count from the other end of N than the scan."""
    tile = {"REVERSE": reverse, "BLOCK": bucket(parts)}
    return Plan(carry_products, (v.M * v.K,), (v.K, parts, v.M * v.K), tile, 4)


@dataclass
class ScanInParts:
    """A scan: call with ``(x, y)``. One launch, or three where M and K alone give too few programs: what each part of N comes
    to, what comes before each, and the parts, which read x a second time."""

    shape: tuple[int, int, int]  # M, parts of N, K
    scan: Any  # (x, carry, y, totals)
    totals: Any  # the same
    carries: Any  # (totals, carry), where there are several parts
    scaled: bool  # totals are products beside powers of two

    def __call__(self, x: Tensor, y: Tensor) -> None:
        carry = totals = x
        if self.carries is not None:
            carry, *_ = between = torch.empty((2 + self.scaled, *self.shape), dtype=torch.float32, device=x.device)
            totals = between[1:]
            self.totals(x, carry, y, totals)
            self.carries(totals, carry)
        self.scan(x, carry, y, totals)


@dataclass
class GradientInParts:
    """A gradient: call with ``(x, y, dy, dx)``. One launch, or three where N is cut into parts: the step of the recurrence
    that each part comes to, what these carry to each part, and the parts."""

    shape: tuple[int, int, int]  # M, parts of N, K
    gradient: Any  # (x, y, dy, carry, totals, scales, dx)
    totals: Any  # the same
    carries: Plan  # (totals, scales, carry)

    @classmethod
    def of(cls, m: int, parts: int, k: int, launch: Callable[[str], Any], *, reverse: bool) -> "GradientInParts":
        """``launch`` makes the one of a mode: WHOLE, CARRIED or TOTALS."""
        carries = Plan(carry_parts, (m * k,), (k, parts), {"REVERSE": reverse, "BLOCK": bucket(parts)}, 4)
        return cls((m, parts, k), launch("WHOLE" if parts == 1 else "CARRIED"), launch("TOTALS"), carries)

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
        carry = totals = scales = x
        if self.shape[1] > 1:
            totals, scales, carry = torch.empty((3, *self.shape), dtype=torch.float32, device=x.device).unbind(0)
            self.totals(x, y, dy, carry, totals, scales, dx)
            self.carries(totals, scales, carry)
        self.gradient(x, y, dy, carry, totals, scales, dx)


@dataclass
class RowsPlan:
    """A scan of rows: call with ``(x, y)``. ``launch`` takes so many zeroed ``words`` between them: a look-back's state."""

    launch: Any
    words: int = 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        if self.words:
            self.launch(x, torch.zeros(self.words, dtype=torch.int64, device=x.device), y)
        else:
            self.launch(x, y)


def tiles_plan(
    v: AxisView, y: AxisView, config: Config, x: Tensor, formula: Formula, shift: int, reverse: bool, *,
    cut: bool = True,
) -> ScanInParts:  # fmt: skip
    """A scan by tiles that walk. ``shift``: 1 for an exclusive scan; ``cut``: N may be cut into parts."""
    t = Tiling(v, config, x.device, cut=cut)
    scalars = (v.M, v.N, v.K, t.parts, v.m, v.n, v.k, y.m, y.n, y.k)
    known = {**formula.constants, **t.constants, "REVERSE": reverse, "SHIFT": -shift if reverse else shift}
    known |= {"ONCE": t.chunk == t.reach, "VECTOR": vector(v, x, t.reach, reverse)}
    known |= {"UNIT": v.unit(y), "DENSE": v.dense_axis}

    def launch(*, totals: bool = False, carried: bool = False) -> Plan:
        constants = {**known, "TOTALS": totals, "CARRIED": carried, "SCALED": totals and formula.scaled}
        return Plan(scan_tiles, t.grid, scalars, constants, t.num_warps)

    carries: ScanInParts | Plan | None = None
    if t.parts > 1 and formula.scaled:
        carries = carry_products_launch(v, t.parts, reverse)
    elif t.parts > 1:
        between = AxisView(v.M, t.parts, v.K, t.parts * v.K, v.K, 1)
        carries = tiles_plan(between, between, config, x, formula, 1, reverse, cut=False)
    return ScanInParts((v.M, t.parts, v.K), launch(carried=t.parts > 1), launch(totals=True), carries, formula.scaled)
