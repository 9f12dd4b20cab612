"""The Triton kernels of all scans, over a view [M, N, K] of a tensor along N.

M is whatever lies before the scanned axis, K what lies after it. ``scan_tiles`` walks along N with a carry and serves every
view; ``scan_long_rows`` scans rows that are long and few in one pass over memory, by decoupled look-back. An exclusive
scan is an inclusive one of the input shifted by one element, and a reversed one runs from the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.reduction.kernels import known_strides, larger, place

# ---- formulas: SCAN along axis 1, TOTAL of axis 1, JOIN of two results -----------------------------------------------


@triton.jit
def running_sum(tile):
    return tl.cumsum(tile, axis=1)


@triton.jit
def total_sum(tile):
    return tl.sum(tile, axis=1)


@triton.jit
def plus(a, b):
    return a + b


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
    """Where the elements of a tile lie along N, in the order of the scan, [1, REACH, 1].

    Backwards along a dense axis the VECTORs of one access run backwards, [1, REACH / VECTOR, VECTOR], and their elements
    forwards until ``in_order`` turns them, which only renames registers. Triton's own reversed scan turns a tile by ten
    shuffles an element, and addresses that fall one by one make accesses of one element.
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
    """And back."""
    if VECTOR > 1:
        return tl.flip(tl.reshape(tile, [ROWS, REACH // VECTOR, VECTOR]), 2)
    else:
        return tile


# ---- scans -----------------------------------------------------------------------------------------------------------


@triton.jit
def scan_tiles(
    x_ptr, carry_ptr, y_ptr, M, N, K, PARTS, x_m, x_n, x_k, y_m, y_n, y_k,
    SCAN: tl.constexpr, TOTAL: tl.constexpr, JOIN: tl.constexpr, NEUTRAL: tl.constexpr,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, TOTALS: tl.constexpr, CARRIED: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, ONCE: tl.constexpr,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """y[m, n, k] = x[m, 0, k] + … + x[m, n - SHIFT, k], with the formula's operation for +.

    One program walks a tile [ROWS, REACH, COLS] along the CHUNK of its part, and asks for the next tile before it works on
    this one. Where N is cut into several parts, a first launch writes only the TOTALS of each, carry [M, PARTS, K] (SCALED:
    and behind them their powers of two), and the last one starts from what comes before its part: carry [M, PARTS, K].
    """
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    _, _, y_m, y_n, y_k = known_strides(N, K, y_m, y_n, y_k, UNIT, DENSE)
    row, part, col = place(K, PARTS, ROWS, COLS)
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
    beside = ((row + m2) * PARTS + part) * K + col + k2  # this program's place in [M, PARTS, K]
    in_beside = (m2 < M - row) & (k2 < K - col)
    if CARRIED:
        carry = tl.load(carry_ptr + beside, mask=in_beside, other=NEUTRAL)
    power = tl.zeros([ROWS, COLS], tl.float32)
    x = in_order(shifted_load(x_ptr, from_lane, at, n, x_n, N, there, NEUTRAL, SHIFT), ROWS, REACH, VECTOR)
    if ONCE:
        if TOTALS:
            carry = TOTAL(x)
            if SCALED:
                carry, power = scaled(carry, power)
        else:
            y = SCAN(x)
            if CARRIED:
                y = JOIN(carry[:, None, :], y)
            y = in_memory(y, ROWS, REACH, VECTOR)
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
        tl.store(carry_ptr + beside, carry, mask=in_beside)
        if SCALED:
            tl.store(carry_ptr + tl.cast(M, tl.int64) * PARTS * K + beside, power, mask=in_beside)


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
    """A word that says that the value is there, and the value: both come with one load."""
    return (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)


@triton.jit
def unpacked(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def asked(words_ptr, COUNT, GROUP: tl.constexpr):
    """The first COUNT of GROUP words, each there or not yet; what stands for the others is there."""
    j = tl.arange(0, GROUP)
    return tl.load(words_ptr + j, mask=j < COUNT, other=1 << 32, volatile=True)


@triton.jit
def joined(words, words_ptr, COUNT, TOTAL: tl.constexpr, NEUTRAL: tl.constexpr, GROUP: tl.constexpr):
    """The values of the first COUNT words as one tree, once all are there."""
    while tl.min(words >> 32, axis=0) == 0:
        words = asked(words_ptr, COUNT, GROUP)
    values = tl.where(tl.arange(0, GROUP) < COUNT, unpacked(words), NEUTRAL)
    return tl.sum(tl.reshape(TOTAL(tl.reshape(values, [1, GROUP, 1])), [1]), axis=0)


@triton.jit
def scan_long_rows(
    x_ptr, state_ptr, y_ptr, N, TILES, x_m, x_n, y_m, y_n,
    SCAN: tl.constexpr, TOTAL: tl.constexpr, JOIN: tl.constexpr, NEUTRAL: tl.constexpr,
    REVERSE: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The same for rows [M, N] in one pass over memory: each program scans one tile and looks back for what comes before.

    Decoupled look-back (Merrill & Garland 2016), with one change: theirs adds whatever predecessors happen to have
    published, so its rounding depends on timing. Here GROUP tiles form a group and GROUP groups a stretch, and a tile always
    adds the totals of the tiles before it in its group, as one tree, to those of the groups before that in its stretch, to what
    comes before the stretch: the same bits every time. The chain from stretch to stretch is GROUP² times shorter than from
    tile to tile.

    state, zeroed int64: [0] counts programs, whose order is that of their start, so that whoever is waited for runs already;
    then, of each row, a word for each tile's and each group's total and one for what comes before each stretch (``packed``).
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
    group, place = i // GROUP, i % GROUP
    stretch, group_place = group // GROUP, group % GROUP
    totals_ptr = state_ptr + 1 + row * (TILES + groups + tl.cdiv(groups, GROUP))
    groups_ptr = totals_ptr + TILES
    prefix_ptr = groups_ptr + groups + stretch
    totals_ptr += group * GROUP
    groups_ptr += stretch * GROUP
    total = tl.sum(tl.reshape(TOTAL(x), [1]), axis=0)  # of one row: the total itself
    tl.atomic_xchg(totals_ptr + place, packed(total), sem="relaxed")
    near = asked(totals_ptr, place, GROUP)
    far = asked(groups_ptr, group_place, GROUP)
    y = SCAN(x)
    prefix = joined(near, totals_ptr, place, TOTAL, NEUTRAL, GROUP)
    if place == GROUP - 1:
        tl.atomic_xchg(groups_ptr + group_place, packed(JOIN(prefix, total)), sem="relaxed")
    prefix = JOIN(joined(far, groups_ptr, group_place, TOTAL, NEUTRAL, GROUP), prefix)
    if stretch > 0:
        word = tl.load(prefix_ptr, volatile=True)
        while word == 0:
            word = tl.load(prefix_ptr, volatile=True)
        prefix = JOIN(unpacked(word), prefix)
    if (place == GROUP - 1) & (group_place == GROUP - 1) & (i + 1 < TILES):
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
def look(ptr, lane, stride, at, n, N, there, OTHER: tl.constexpr):
    """Element at + n, OTHER where there is none."""
    inside = there & (at + n >= 0) & (n < N - at)
    return tl.load(ptr + at * stride + lane, mask=inside, other=OTHER, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def gradient_tiles(
    x_ptr, y_ptr, dy_ptr, carry_ptr, scale_ptr, dx_ptr, M, N, K, PARTS,
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
    row, part, col = place(K, PARTS, ROWS, COLS)
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
        b = look(dy_ptr, dy_lane, dy_n, at + STEP * SHIFT, n, N, inside, 0.0)
        if LOG:
            near = look(y_ptr, y_lane, y_n, at + STEP * SHIFT, n, N, inside, float("inf"))
            far = look(y_ptr, y_lane, y_n, at + STEP * (SHIFT + 1), n, N, inside, float("inf"))
            a = tl.where(near == far, 1.0, tl.exp(near - far))
        else:
            a = look(x_ptr, x_lane, x_n, at + STEP, n, N, inside, 1.0)
        a = tl.where(inside, a, 1.0)
        a, b = in_order(a, ROWS, REACH, VECTOR), in_order(b, ROWS, REACH, VECTOR)
        a, b = tl.associative_scan((a, b), 1, then)
        r = b + a * carry[:, None, :]
        following = tl.sum(tl.where(last, r, 0.0), axis=1)
        scale *= tl.sum(tl.where(last, a, 0.0), axis=1)
        if not TOTALS:
            r = in_memory(r, ROWS, REACH, VECTOR)
            if LOG:
                x = look(x_ptr, x_lane, x_n, at, n, N, inside, 0.0)
                dx = tl.exp(x - near) * r
            else:
                dx = look(y_ptr, y_lane, y_n, at + STEP * (SHIFT - 1), n, N, inside, 1.0) * r
            tl.store(dx_ptr + at * dx_n + dx_lane, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        carry = following
        at += -REACH if REVERSE else REACH
    if TOTALS:
        tl.store(carry_ptr + beside, carry, mask=in_beside)
        tl.store(scale_ptr + beside, scale, mask=in_beside)


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
