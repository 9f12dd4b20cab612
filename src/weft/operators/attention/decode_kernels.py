"""Attention of few queries over a long cache of keys and values: split over the keys, parts merged.

The queries of all heads that share a head of the cache are packed as rows of one tile: row r is query r // group of head
r % group. A program walks a stretch of keys (a part) for one tile of rows and one head of the cache. Where a sequence has
several parts, each leaves its sum, maximum and weighted values in fp32, and ``combine`` merges them in the order of the keys.
Lengths, tables and plans are read on the device: a captured launch is right for whatever they hold when it is replayed.
"""

import triton
import triton.language as tl

from weft.operators.attention.kernels import LOG2E, base, scores, visible, widened

UNIT = tl.constexpr(16384.0)
# B batch, H heads of q, G heads of the cache, R rows (queries x heads that share), M rows and N keys of a tile


@triton.jit
def part_of(
    slot, tile, plan_ptr, lengths_ptr, batches, group, queries, capacity, splits, each, left, right,
    M: tl.constexpr, N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, LENGTHS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Which part of which sequence a slot is: batch, length, number of the part, how many there are, its first key and
    the one behind its last. A part's number may be beyond the last: it has nothing to do.

    SPLIT says how visible keys are divided: not at all (``whole``); ``evenly`` into at most ``splits`` parts, of no less than
    ``each`` tiles; in ``chunks`` of
    ``each`` tiles from key 0 on, whatever the length; or as a ``plan`` says, which holds B + 1 first slots and the tiles of a
    part."""
    if SPLIT == "plan":
        b, high = tl.cast(0, tl.int32), tl.cast(batches - 1, tl.int32)
        while b < high:
            middle = (b + high + 1) // 2
            reached = tl.load(plan_ptr + middle) <= slot
            b = tl.where(reached, middle, b)
            high = tl.where(reached, high, middle - 1)
        origin = tl.load(plan_ptr + b)
        parts = tl.load(plan_ptr + b + 1) - origin
        each = tl.load(plan_ptr + batches + 1)
    else:
        b, origin, parts = slot // splits, slot // splits * splits, splits
    length = tl.cast(capacity, tl.int32)
    if LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), capacity)
    first = tile * M // group
    count = (tl.minimum(tile * M + M, queries * group) - 1) // group - first + 1
    begin, _, _, end = visible(first, count, queries, length, left, right, LEFT, RIGHT, N)
    part = slot - origin
    if SPLIT == "chunks":
        chunk = begin // (each * N)
        parts = tl.maximum(tl.cdiv(end, each * N) - chunk, 1)
        start, stop = (chunk + part) * each * N, (chunk + part + 1) * each * N
        start = tl.maximum(start, begin)
    else:
        if SPLIT == "evenly":
            tiles = tl.cdiv(tl.maximum(end - begin, 0), N)
            each = tl.maximum(tl.cdiv(tiles, splits), each)
            parts = tl.maximum(tl.cdiv(tiles, each), 1)
        start = begin + part * each * N
        stop = tl.where(part == parts - 1, end, start + each * N)  # a plan may have been made for shorter sequences
    return b, length, part, parts, start, tl.minimum(stop, end)


@triton.jit
def pages_of(table_ptr, n, stop, pages, table_s, PAGE: tl.constexpr, N: tl.constexpr):
    """The pages of a tile of keys, -1 for none: [N], or where pages and tiles fit into each other [pages of a tile]."""
    if PAGE % N == 0:
        page = tl.load(table_ptr + (n // PAGE + tl.arange(0, 1)) * table_s, mask=n < stop, other=-1)
    elif N % PAGE == 0:
        token = n + tl.arange(0, N // PAGE) * PAGE
        page = tl.load(table_ptr + token // PAGE * table_s, mask=token < stop, other=-1)
    else:
        token = n + tl.arange(0, N)
        page = tl.load(table_ptr + token // PAGE * table_s, mask=token < stop, other=-1)
    return tl.where(page < pages, page, -1)


@triton.jit
def inside_of(n, stop, page, PAGE: tl.constexpr, N: tl.constexpr):
    """Which keys of a tile there are, [N]."""
    there = n + tl.arange(0, N) < stop
    if PAGE > 0:
        there &= spread(page, PAGE, N) >= 0
    return there


@triton.jit
def rows_of(n, page, page_stride, token_stride, PAGE: tl.constexpr, N: tl.constexpr):
    """The offset of each key of a tile, int64 [N, 1]; ``page`` as ``pages_of`` gives them."""
    if PAGE == 0:
        at = tl.cast(n, tl.int64) * token_stride + tl.arange(0, N) * token_stride
    else:
        at = tl.maximum(spread(page, PAGE, N), 0).to(tl.int64) * page_stride
        at += (n + tl.arange(0, N)) % PAGE * token_stride
    return at[:, None]


@triton.jit
def spread(x, PAGE: tl.constexpr, N: tl.constexpr):
    """What holds for each of ``pages_of``, for each key: [N]."""
    if PAGE % N == 0:
        return tl.broadcast_to(x, [N])
    elif N % PAGE == 0:
        return tl.reshape(tl.broadcast_to(x[:, None], [N // PAGE, PAGE]), [N])
    else:
        return x


@triton.jit
def read_keys(ptr, at, inside, col_stride, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """[N, COLS] from the rows of the cache at ``at`` ([N, 1] or a scalar offset); 0 where a key is not ``inside``."""
    col = tl.arange(0, COLS)[None, :]
    if WIDTH < COLS:
        return tl.load(ptr + at + col * col_stride, mask=inside & (col < WIDTH), other=0)
    else:
        return tl.load(ptr + at + col * col_stride, mask=inside, other=0)


# Two int16, each two codes, are a register; of these the even or the odd codes become two fp16. int8: x ^ 0x6480 are the bits
# of 1024 + 128 + x. The interpreter has no assembly.
FP8 = "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, %s; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; }"
INT8 = "{ .reg .b32 t, c; mov.b32 c, 0x64806480; shr.b32 t, $1, %s; lop3.b32 t, t, 0x00ff00ff, c, 0x6a; sub.f16x2 $0, t, c; }"
FP8_EVEN, FP8_ODD = tl.constexpr(FP8 % "0x20"), tl.constexpr(FP8 % "0x31")
INT8_EVEN, INT8_ODD = tl.constexpr(INT8 % "0"), tl.constexpr(INT8 % "8")


@triton.jit
def pair(x, like, FORMAT: tl.constexpr):
    """Codes of even and of odd columns as numbers, from pairs of codes in int16. Pairs come from shared memory as operands of
    16 bits do, by matrix; a matrix instruction's operand of 8 bits would come a byte at a time."""
    if FORMAT == "fp8":
        even = tl.inline_asm_elementwise(FP8_EVEN, "=r,r", [x], tl.float16, True, 2)
        odd = tl.inline_asm_elementwise(FP8_ODD, "=r,r", [x], tl.float16, True, 2)
    elif FORMAT == "int8":
        even = tl.inline_asm_elementwise(INT8_EVEN, "=r,r", [x], tl.float16, True, 2)
        odd = tl.inline_asm_elementwise(INT8_ODD, "=r,r", [x], tl.float16, True, 2)
    else:
        even = widened((x & 0xFF).to(tl.uint8), like, FORMAT)
        odd = widened(((x >> 8) & 0xFF).to(tl.uint8), like, FORMAT)
    return even, odd


@triton.jit
def power_of(q):
    """Of each row the power of two, [M], over which its largest element is 1 … 2: q over it is in fp16's range, and products
    with codes in fp16 need no further conversion. Probabilities are then multiplied by UNIT, so that small ones remain."""
    power = (tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power == 0.0, 1.0, power)


@triton.jit
def finish(
    o_ptr, lse_ptr, acc, peak, total, sink, v_scale, row, at, lse_at, inside, o_d,
    DV: tl.constexpr, DV_COLS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Adds the sink, normalises and writes rows of the output ([ROWS, DV], at ``at``) and their log-sum-exp."""
    if SINKS:
        new = tl.maximum(peak, sink)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2((peak - safe) * LOG2E)
        total = total * shrink + tl.exp2((sink - safe) * LOG2E)
        acc *= shrink[:, None]
        peak = new
    total = tl.where(total == 0.0, 1.0, total)
    y = acc * (v_scale / total)[:, None]
    col = tl.arange(0, DV_COLS)[None, :]
    mask = inside[:, None]
    if DV < DV_COLS:
        mask = mask & (col < DV)
    tl.store(o_ptr + at[:, None] + col * o_d, y.to(o_ptr.dtype.element_ty), mask=mask)
    if LSE:
        tl.store(lse_ptr + lse_at, peak + tl.log2(total) / LOG2E, mask=inside)


@triton.jit
def row_addresses(b, g, row, groups, group, queries, o_b, o_h, o_s):
    """Of packed rows: head, offset in the output, offset in the log-sum-exp [B, H, Sq]."""
    head, query = g * group + row % group, row // group
    at = tl.cast(b, tl.int64) * o_b + head.to(tl.int64) * o_h + query.to(tl.int64) * o_s
    lse_at = (tl.cast(b, tl.int64) * (groups * group) + head) * queries + query
    return head, at, lse_at


@triton.jit
def absorb(
    acc, acc_odd, peak, total, q, q_odd, unit, k, v, there, token, b, g, i, queries, length, left, right, scale, softcap, slope,
    FORMAT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    HALF: tl.constexpr, ACCURATE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A tile of keys [N, D] and values [N, DV], as the cache holds them, in the running sums of an online softmax; ``there``
    and ``token`` [N] say which of the keys there are, and their positions."""
    if PAIRS:
        even, odd = pair(k, q.dtype, FORMAT)
        qk = tl.dot(q_odd, tl.trans(odd), tl.dot(q, tl.trans(even))) * unit
    else:
        qk = tl.dot(q, tl.trans(widened(k, q.dtype, FORMAT)), input_precision="ieee") * unit
    s, _inner, _outer = scores(
        qk, 1.0, 1.0, b, g, i, token[None, :], queries, length, left, right, scale, softcap, slope, False, SOFTCAP, ALIBI,
        False, False, None, None, LEFT, RIGHT, LEFT or RIGHT, False, ACCURATE,
    )  # fmt: skip
    s = tl.where(there[None, :], s, float("-inf"))
    new = tl.maximum(peak, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2((s - safe[:, None]) * LOG2E)
    shrink = tl.exp2((peak - safe) * LOG2E)
    total = total * shrink + tl.sum(p, 1)
    if HALF:
        p *= UNIT
    if PAIRS:
        even, odd = pair(v, q.dtype, FORMAT)
        acc_odd = tl.dot(p.to(q.dtype), odd, acc_odd * shrink[:, None])
        acc = tl.dot(p.to(q.dtype), even, acc * shrink[:, None])
    else:
        acc = tl.dot(p.to(q.dtype), widened(v, q.dtype, FORMAT), acc * shrink[:, None], input_precision="ieee")
    return acc, acc_odd, new, total


@triton.jit
def walk(
    acc, acc_odd, peak, total, q, q_odd, unit, start, stop, k_ptr, v_ptr, table_ptr, b, g, i, queries, length, pages, left,
    right, scale, softcap, slope, k_b, k_s, k_d, v_b, v_s, v_d, table_s,
    D: tl.constexpr, DV: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    ALIKE: tl.constexpr, FORMAT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, HALF: tl.constexpr, ACCURATE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Keys ``start`` … ``stop - 1`` of a sequence, tile by tile; pointers are those of its head and of its row of the table."""
    PAIR: tl.constexpr = 2 if PAIRS else 1
    page = tl.zeros([1], tl.int32)
    if PAGE > 0:
        page = pages_of(table_ptr, start, stop, pages, table_s, PAGE, N)
    for n in tl.range(start, stop, N):
        token = n + tl.arange(0, N)
        there = inside_of(n, stop, page, PAGE, N)
        if LEFT:  # what lies before the window may be NaN, or another sequence's by now
            there &= length - queries - token <= left
        k_rows = rows_of(n, page, k_b, k_s, PAGE, N)
        v_rows = k_rows if ALIKE else rows_of(n, page, v_b, v_s, PAGE, N)
        if PAGE > 0:  # one tile ahead: addresses wait for nothing
            page = pages_of(table_ptr, n + N, stop, pages, table_s, PAGE, N)
        k = read_keys(k_ptr, k_rows, there[:, None], k_d, D // PAIR, D_COLS // PAIR)
        v = read_keys(v_ptr, v_rows, there[:, None], v_d, DV // PAIR, DV_COLS // PAIR)
        acc, acc_odd, peak, total = absorb(
            acc, acc_odd, peak, total, q, q_odd, unit, k, v, there, token, b, g, i, queries, length, left, right, scale,
            softcap, slope, FORMAT, SOFTCAP, ALIBI, LEFT, RIGHT, HALF, ACCURATE, PAIRS,
        )  # fmt: skip
    return acc, acc_odd, peak, total


@triton.jit
def leave(parts_ptr, part, acc, peak, total, M: tl.constexpr, KEPT: tl.constexpr, DV_COLS: tl.constexpr):
    """The sums of a part, where they are merged from: KEPT rows of values, then their peaks, then their totals."""
    kept = tl.arange(0, M)
    parts_ptr += part.to(tl.int64) * (KEPT * (DV_COLS + 2))
    at = parts_ptr + (kept * DV_COLS)[:, None] + tl.arange(0, DV_COLS)[None, :]
    tl.store(at, acc, mask=(kept < KEPT)[:, None])
    tl.store(parts_ptr + KEPT * DV_COLS + kept, peak, mask=kept < KEPT)
    tl.store(parts_ptr + KEPT * (DV_COLS + 1) + kept, total, mask=kept < KEPT)


LENGTHS = ["batches", "groups", "group", "queries", "capacity", "splits", "each", "tiles", "left", "right"]


@triton.jit(do_not_specialize=[*LENGTHS, "pages"])
def attend_part(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, parts_ptr, lengths_ptr, table_ptr, sinks_ptr, alibi_ptr, k_scale_ptr, v_scale_ptr,
    plan_ptr,
    batches, groups, group, queries, capacity, pages, splits, each, tiles, left, right, scale: tl.float32, softcap: tl.float32,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d, table_b, table_s, alibi_b, alibi_h,
    k_scale_h, v_scale_h,
    D: tl.constexpr, DV: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KEPT: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr, ALIKE: tl.constexpr, LENGTHS: tl.constexpr,
    FORMAT: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr, LSE: tl.constexpr, ACCURATE: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """One part: scores of M rows with its keys, an online softmax over tiles of N. The heads of a cache are neighbours in the
    grid, since a token's heads may be neighbours in memory. PAGE is the tokens of a page, 0 for a cache in one piece;
    ALIKE, that k and v have the same strides; PAIRS, that k and v are codes as pairs of columns in int16, their strides in
    these."""
    program = tl.program_id(0)
    tile, g, slot = program % tiles, program // tiles % groups, program // tiles // groups
    b, length, part, parts, start, stop = part_of(
        slot, tile, plan_ptr, lengths_ptr, batches, group, queries, capacity, splits, each, left, right, M, N, LEFT, RIGHT,
        LENGTHS, SPLIT,
    )  # fmt: skip
    if part >= parts:
        return
    row = tile * M + tl.arange(0, M)
    inside = row < queries * group
    head, o_at, lse_at = row_addresses(b, g, row, groups, group, queries, o_b, o_h, o_s)
    i = (row // group)[:, None]
    PAIR: tl.constexpr = 2 if PAIRS else 1
    col = tl.arange(0, D_COLS // PAIR)[None, :]
    q_at = tl.cast(b, tl.int64) * q_b + head.to(tl.int64) * q_h + (row // group).to(tl.int64) * q_s
    mask = inside[:, None]
    if D < D_COLS:
        mask = mask & (col < D // PAIR)
    q = tl.load(q_ptr + q_at[:, None] + col * (q_d * PAIR), mask=mask, other=0.0)
    q_odd, unit = q, 1.0
    if PAIRS:
        q_odd = tl.load(q_ptr + q_at[:, None] + (2 * col + 1) * q_d, mask=mask, other=0.0)
    if HALF:
        power = tl.maximum(power_of(q), power_of(q_odd))
        unit = power[:, None]
        q, q_odd = (q / unit).to(tl.float16), (q_odd / unit).to(tl.float16)
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_ptr + tl.cast(b, tl.int64) * alibi_b + head * alibi_h, mask=inside, other=0.0)
        slope = slope.to(tl.float32)[:, None]
    v_scale = 1.0 / UNIT if HALF else 1.0
    if SCALED:
        scale *= tl.load(k_scale_ptr + g * k_scale_h)
        v_scale *= tl.load(v_scale_ptr + g * v_scale_h)
    k_ptr, v_ptr = base(k_ptr, 0, g, 0, 0, k_h, 0), base(v_ptr, 0, g, 0, 0, v_h, 0)
    table_ptr += tl.cast(b, tl.int64) * table_b
    if PAGE == 0:
        k_ptr += tl.cast(b, tl.int64) * k_b
        v_ptr += tl.cast(b, tl.int64) * v_b
    acc, total = tl.zeros([M, DV_COLS // PAIR], tl.float32), tl.zeros([M], tl.float32)
    acc_odd = acc
    peak = tl.full([M], float("-inf"), tl.float32)
    acc, acc_odd, peak, total = walk(
        acc, acc_odd, peak, total, q, q_odd, unit, start, stop, k_ptr, v_ptr, table_ptr, b, g, i, queries, length, pages, left,
        right, scale, softcap, slope, k_b, k_s, k_d, v_b, v_s, v_d, table_s, D, DV, D_COLS, DV_COLS, N, PAGE, ALIKE, FORMAT,
        SOFTCAP, ALIBI, LEFT, RIGHT, HALF, ACCURATE, PAIRS,
    )  # fmt: skip
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    if parts == 1:
        sink = 0.0
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32)
        finish(o_ptr, lse_ptr, acc, peak, total, sink, v_scale, row, o_at, lse_at, inside, o_d, DV, DV_COLS, SINKS, LSE)
    elif SPLIT != "whole":
        leave(parts_ptr, program, acc, peak, total, M, KEPT, DV_COLS)


@triton.jit(do_not_specialize=LENGTHS)
def combine(
    o_ptr, lse_ptr, parts_ptr, lengths_ptr, sinks_ptr, v_scale_ptr, plan_ptr,
    batches, groups, group, queries, capacity, splits, each, tiles, left, right, o_b, o_h, o_s, o_d, v_scale_h,
    DV: tl.constexpr, DV_COLS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KEPT: tl.constexpr, SPLIT: tl.constexpr,
    LENGTHS: tl.constexpr, SINKS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SCALED: tl.constexpr,
    HALF: tl.constexpr, LSE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A program merges the parts of one row, PARTS at a time, in the order of the keys."""
    program = tl.program_id(0)
    kept, rest = program % KEPT, program // KEPT
    tile, rest = rest % tiles, rest // tiles
    g, b = rest % groups, rest // groups
    row = tile * M + kept
    first = b * splits
    if SPLIT == "plan":
        first = tl.load(plan_ptr + b)
    _, _, _, parts, _, _ = part_of(
        first, tile, plan_ptr, lengths_ptr, batches, group, queries, capacity, splits, each, left, right, M, N, LEFT, RIGHT,
        LENGTHS, SPLIT,
    )  # fmt: skip
    if (row >= queries * group) | (parts == 1):
        return
    SIZE: tl.constexpr = KEPT * (DV_COLS + 2)
    parts_ptr += ((tl.cast(first, tl.int64) * groups + g) * tiles + tile) * SIZE
    step = tl.cast(groups * tiles, tl.int64) * SIZE
    col = tl.arange(0, DV_COLS)[None, :]
    acc, total, peak = tl.zeros([DV_COLS], tl.float32), 0.0, float("-inf")
    for n in tl.range(0, parts, PARTS):
        part = n + tl.arange(0, PARTS)
        there = part < parts
        at = parts_ptr + part * step
        peaks = tl.load(at + KEPT * DV_COLS + kept, mask=there, other=float("-inf"))
        totals = tl.load(at + KEPT * (DV_COLS + 1) + kept, mask=there, other=0.0)
        values = tl.load(at[:, None] + kept * DV_COLS + col, mask=there[:, None], other=0.0)
        new = tl.maximum(peak, tl.max(peaks, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2((peaks - safe) * LOG2E)
        shrink = tl.exp2((peak - safe) * LOG2E)
        acc = acc * shrink + tl.sum(values * weight[:, None], 0)
        total = total * shrink + tl.sum(totals * weight, 0)
        peak = new
    one = tl.arange(0, 1)
    row = row + one
    head, o_at, lse_at = row_addresses(b, g, row, groups, group, queries, o_b, o_h, o_s)
    sink = 0.0
    v_scale = 1.0 / UNIT if HALF else 1.0
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
    if SCALED:
        v_scale *= tl.load(v_scale_ptr + g * v_scale_h)
    inside = row >= 0
    zero = tl.zeros([1], tl.float32)
    finish(
        o_ptr, lse_ptr, acc[None, :], zero + peak, zero + total, sink, v_scale, row, o_at, lse_at, inside, o_d, DV, DV_COLS,
        SINKS, LSE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batches", "queries", "capacity", "slots", "left", "right"])
def divide(
    lengths_ptr, plan_ptr, batches, queries, capacity, slots, left, right,
    N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the fewest tiles a part so that all sequences' parts fit ``slots``, and each sequence's first slot."""
    b = tl.arange(0, BLOCK)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b, mask=b < batches, other=0), 0), capacity)
    begin, _, _, end = visible(0, queries, queries, length, left, right, LEFT, RIGHT, N)
    tiles = tl.where(b < batches, tl.cdiv(tl.maximum(end - begin, 0), N), 0)
    low, high = tl.cast(1, tl.int32), tl.maximum(tl.max(tiles, 0), 1)
    while low < high:
        each = (low + high) // 2
        fits = tl.sum(tl.where(b < batches, tl.maximum(tl.cdiv(tiles, each), 1), 0), 0) <= slots
        high = tl.where(fits, each, high)
        low = tl.where(fits, low, each + 1)
    parts = tl.where(b < batches, tl.maximum(tl.cdiv(tiles, low), 1), 0)
    tl.store(plan_ptr + 1 + b, tl.cumsum(parts, 0), mask=b < batches)
    tl.store(plan_ptr, 0)
    tl.store(plan_ptr + batches + 1, low)
