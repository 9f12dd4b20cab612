"""What attention's kernels share: where a program works, tiles of scores and probabilities. And forward.

A kernel with nothing to add to the products (PLAIN) leaves scores unscaled until the exponent, where scale · log2(e) is one
factor of a multiply-add. Others make scores in natural units first. Of each row, forward stores its maximum (``peak``, in units
of the exponent of 2 if PLAIN, else natural; -inf where no key is seen) and ``log_sum``, log2 of its sum relative to that: two
numbers, since in the sum of both a maximum of -1e30 would absorb the logarithm.
"""

import triton
import triton.language as tl

from weft.operators.dropout.philox import random_bits
from weft.operators.loss.kernels import tanh
from weft.operators.quantization.kernels import decode as decoded

# B batch (or N sequences), H heads of q, G heads of k and v, M queries and N keys of a tile, D and DV head dims
LOG2E = tl.constexpr(1.4426950408889634)


# ---- where a program works -------------------------------------------------------------------------------------------


@triton.jit
def extent(cu_ptr, b, sequences, tokens, rest, PACKED: tl.constexpr):
    """First token (int64) and length of a sequence. Ahead of the first one (b = -1) and behind the last one are the tokens,
    up to ``rest``, that belong to none. Bounds out of range are clamped, so that no address is."""
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + b, mask=b >= 0, other=0), 0), tokens)
        stop = tl.minimum(tl.load(cu_ptr + b + 1, mask=b < sequences, other=rest), tokens)
        stop = tl.where(b < 0, tl.minimum(stop, rest), stop)
        return tl.cast(start, tl.int64), tl.maximum(stop - start, 0)
    else:
        return tl.cast(0, tl.int64), tokens


@triton.jit
def tile_of(cu_ptr, slots, heads, sequences, tokens, SIZE: tl.constexpr, PACKED: tl.constexpr, REVERSED: tl.constexpr):
    """Of a program: batch (or sequence), head, first row of its tile, the sequence's first token and length.

    Packed sequences have tiles of their own: those of sequence b are numbered from ``cu[b] // SIZE + b + 1`` on, which leaves
    room for any lengths, and a program finds b by bisection. Some numbers have no tile."""
    slot, head = tl.program_id(0) % slots, tl.program_id(0) // slots
    if REVERSED:  # the longest rows of a causal mask first
        slot = slots - 1 - slot
    if PACKED:
        b, high = tl.cast(-1, tl.int32), tl.cast(sequences, tl.int32)
        while b < high:
            middle = (b + high + 1) // 2
            reached = tl.load(cu_ptr + middle) // SIZE + middle + 1 <= slot
            b = tl.where(reached, middle, b)
            high = tl.where(reached, high, middle - 1)
        tile = tl.maximum(slot - tl.load(cu_ptr + b, mask=b >= 0, other=0) // SIZE - b - 1, 0)
    else:
        b, head, tile = head // heads, head % heads, slot
    start, length = extent(cu_ptr, b, sequences, tokens, tokens, PACKED)
    return b, head, tile * SIZE, start, length


@triton.jit
def base(ptr, b, head, token, b_stride, head_stride, token_stride):
    return (
        ptr
        + tl.cast(b, tl.int64) * b_stride
        + tl.cast(head, tl.int64) * head_stride
        + tl.cast(token, tl.int64) * token_stride
    )


@triton.jit
def read(
    ptr,
    token_stride,
    col_stride,
    left,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    CHECK: tl.constexpr,
):
    """[ROWS, COLS]: the ``left`` rows that are left (all, unless CHECK), 0 behind them and behind WIDTH columns."""
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    at = ptr + row * token_stride + col * col_stride
    if CHECK:
        if WIDTH < COLS:
            return tl.load(at, mask=(row < left) & (col < WIDTH), other=0.0)
        else:
            return tl.load(at, mask=row < left, other=0.0)
    elif WIDTH < COLS:
        return tl.load(at, mask=col < WIDTH, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def write(ptr, x, token_stride, col_stride, left, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    inside = row < left
    if WIDTH < COLS:
        inside &= col < WIDTH
    tl.store(ptr + row * token_stride + col * col_stride, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def visible(first, rows, queries, keys, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, SIZE: tl.constexpr):
    """Keys that queries ``first`` … ``first + rows - 1`` see, as tiles: from ``begin`` to ``end``, of which all of the rows see
    those from ``inner`` to ``outer``."""
    shift = keys - queries
    last = first + rows - 1
    begin, inner, end, outer = 0, 0, keys, keys // SIZE * SIZE
    if LEFT:
        begin = tl.maximum(first + shift - left, 0) // SIZE * SIZE
        inner = tl.maximum(tl.cdiv(tl.maximum(last + shift - left, 0), SIZE) * SIZE, begin)
    if RIGHT:
        end = tl.minimum(tl.maximum(last + shift + right + 1, 0), keys)
        outer = tl.minimum(tl.maximum(first + shift + right + 1, 0), keys) // SIZE * SIZE
    return begin, tl.minimum(inner, end), tl.maximum(outer, tl.minimum(inner, end)), end


@triton.jit
def widened(x, like, FORMAT: tl.constexpr):
    """Codes as the numbers that they encode, in the dtype of ``like``."""
    if FORMAT == "fp8":
        return x.to(tl.float8e4nv, bitcast=True).to(like)
    elif FORMAT == "fp8_by_bits":  # for architectures without conversions of that type
        return decoded(x, "fp8_e4m3").to(like)
    elif FORMAT == "int8_by_bits":  # 1024 + 128 + x in fp16
        return (x.to(tl.int16) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        return x.to(like)


# ---- scores and probabilities ----------------------------------------------------------------------------------------


@triton.jit
def tile_at(
    ptr, m, n, queries, keys, row_stride, col_stride, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """[M, N] of a mask or bias from query m and key n on, 0 behind the last ones; TRANSPOSED [N, M]. The tile's address is in
    64 bits, what is added to it in 32. Inside only the program's own rows (keys if TRANSPOSED) may lie behind the last one: a
    bound of columns would make each element a load of its own."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    if TRANSPOSED:
        i, j = tl.arange(0, M)[None, :], tl.arange(0, N)[:, None]
    elif not EDGE:
        i = tl.minimum(i, queries - m - 1)
    n = n // N * N  # as it is; said here, where the compiler makes vectors of the loads
    at = (
        ptr
        + (tl.cast(m, tl.int64) * row_stride + tl.cast(n, tl.int64) * col_stride)
        + (i * row_stride + j * col_stride)
    )
    if EDGE:
        return tl.load(at, mask=(i < queries - m) & (j < keys - n), other=0)
    elif TRANSPOSED:
        return tl.load(at, mask=j < keys - n, other=0)
    else:
        return tl.load(at)


@triton.jit
def beside(
    bias_ptr, mask_ptr, m, n, queries, keys, bias_s, bias_n, mask_s, mask_n,
    M: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, TRANSPOSED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What a tile of scores has added, and what of it is seen (1.0 where there is no such thing). To be called before the
    product: a load after it would give its layout to the rows' maxima and sums, and the compiler would compute all in two."""
    bias, seen = 1.0, 1.0
    if BIAS:
        bias = tile_at(bias_ptr, m, n, queries, keys, bias_s, bias_n, M, N, TRANSPOSED, EDGE)
    if MASK == 1:
        seen = tile_at(mask_ptr, m, n, queries, keys, mask_s, mask_n, M, N, TRANSPOSED, EDGE)
    elif MASK == 2:  # the same for all queries
        j = tl.arange(0, N)
        at = mask_ptr + tl.cast(n, tl.int64) * mask_n + j * mask_n
        seen = tl.load(at, mask=j < keys - n, other=0) if EDGE or TRANSPOSED else tl.load(at)
        seen = tl.expand_dims(seen, 1 if TRANSPOSED else 0)
    return bias, seen


@triton.jit
def scores(
    qk, bias, seen, b, h, i, j, queries, keys, left, right, scale, softcap, slope,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, EDGE: tl.constexpr,
    SLOPES: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Scores of the products ``qk`` of queries i and keys j (which broadcast to its shape), -inf where they are not seen;
    ``bias`` and ``seen`` as :func:`beside` gives them. With SLOPES also the derivatives of soft cap (``inner``) and SCORE
    (``outer``), 1.0 where there is none."""
    inner, outer = 1.0, 1.0
    s = qk
    if not PLAIN:
        s = qk * scale
        if SOFTCAP:
            t = tanh(s / softcap, ACCURATE)
            s = softcap * t
            if SLOPES:
                inner = 1.0 - t * t
        if ALIBI:
            s -= slope * tl.abs(i + (keys - queries) - j).to(tl.float32)
        if BIAS:
            s += bias.to(tl.float32)
        if SCORE is not None:
            if SLOPES:
                outer = SCORE_GRADIENT(s, b, h, i, j)
            s = SCORE(s, b, h, i, j)
    if MASK:
        s = tl.where(seen != 0, s, float("-inf"))
    if EDGE:
        there = (j < keys) & (i < queries)
        if LEFT:
            there &= i + (keys - queries) - j <= left
        if RIGHT:
            there &= j - i - (keys - queries) <= right
        s = tl.where(there, s, float("-inf"))
    return s, inner, outer


@triton.jit
def kept(row, n, pitch, seed, offset, last, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Whether dropout keeps each of [ROWS, COLS] probabilities from column n on; ``row`` (int64) numbers rows of ``pitch``
    groups of 8 random numbers."""
    group = row[:, None] * pitch + (n // 8 + tl.arange(0, COLS // 8))[None, :]
    bits = random_bits(group.to(tl.uint64), seed.to(tl.uint64), offset.to(tl.uint64), 8)
    return tl.reshape(bits, [ROWS, COLS]) > last.to(tl.uint32)


# ---- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def attend(
    acc, total, peak, q, k_ptr, v_ptr, k_tiles, v_tiles, bias_ptr, mask_ptr, begin, end, b, h, m, queries, keys, left, right,
    scale, softcap, slope, k_s, k_d, v_s, v_d, bias_s, bias_n, mask_s, mask_n, row, pitch, seed, offset, last,
    D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    SCORE: tl.constexpr, DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, EDGE: tl.constexpr,
    ACCURATE: tl.constexpr, TMA: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for each tile of keys from ``begin`` to ``end`` (Milakov & Gimelshein 2018)."""
    PRECISION: tl.constexpr = "tf32x3" if ACCURATE and q.shape[1] <= 128 and acc.shape[1] <= 128 else "ieee"
    i = m + tl.arange(0, M)[:, None]
    unit = scale * LOG2E if PLAIN else LOG2E  # from scores to exponents of 2
    if not TMA:
        # Counts in int64, which the addresses want: the compiler would widen n itself and, on the way past a loop without a
        # turn, write accumulators between matrix instructions, which ptxas then makes wait for each other
        # (docs/notes/attention.md).
        begin, end = tl.cast(begin, tl.int64), tl.cast(end, tl.int64)
    for at in tl.range(begin, end, N):
        n = tl.cast(at, tl.int32)
        k = k_tiles.load([n, 0]) if TMA else read(k_ptr + at * k_s, k_s, k_d, keys - n, N, D, D_COLS, EDGE)
        if FORMAT == "fp8_by_bits":
            k = widened(k, q.dtype, FORMAT)
        bias, seen = beside(
            bias_ptr, mask_ptr, m, n, queries, keys, bias_s, bias_n, mask_s, mask_n, M, N, BIAS, MASK, False, EDGE
        )
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        j = n + tl.arange(0, N)[None, :]
        s, _, _ = scores(
            qk, bias, seen, b, h, i, j, queries, keys, left, right, scale, softcap, slope, PLAIN, SOFTCAP, ALIBI, BIAS, MASK,
            SCORE, None, LEFT, RIGHT, EDGE, False, ACCURATE,
        )  # fmt: skip
        new = tl.maximum(peak, tl.max(s, 1))
        safe = new
        if MASK or EDGE or not PLAIN:
            safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2((s - safe[:, None]) * unit) if not PLAIN else tl.exp2(s * unit - (safe * unit)[:, None])
        shrink = tl.exp2((peak - safe) * unit)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(row, n, pitch, seed, offset, last, M, N), p, 0.0)
        v = v_tiles.load([n, 0]) if TMA else read(v_ptr + at * v_s, v_s, v_d, keys - n, N, DV, DV_COLS, EDGE)
        if FORMAT != "":  # fp16 holds every code, and has more of a probability than 8 bits would
            v = widened(v, tl.float16, FORMAT)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = new
    return acc, total, peak


LENGTHS = [
    "seed", "offset", "slots", "heads", "group", "sequences", "query_tokens", "key_tokens", "left", "right", "pitch", "last",
]  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q_ptr, k_ptr, v_ptr, o_ptr, peak_ptr, log_sum_ptr, mask_ptr, bias_ptr, sinks_ptr, alibi_ptr, cu_q_ptr, cu_k_ptr, seed_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, seed: tl.uint64, offset: tl.uint64,
    slots, heads, group, sequences, query_tokens, key_tokens, left, right, pitch, last: tl.uint32,
    scale: tl.float32, softcap: tl.float32, keep_scale: tl.float32,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_s, o_d,
    mask_b, mask_h, mask_s, mask_n, bias_b, bias_h, bias_s, bias_n, alibi_b, alibi_h,
    q_scale_b, q_scale_h, k_scale_b, k_scale_h, v_scale_b, v_scale_h,
    D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, DROPOUT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, PACKED: tl.constexpr, SEED_IN_MEMORY: tl.constexpr, ACCURATE: tl.constexpr, TMA: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """A program makes M rows of one head's output, [M, DV]; it walks the keys that they see."""
    b, h, m, start, queries = tile_of(cu_q_ptr, slots, heads, sequences, query_tokens, M, PACKED, RIGHT)
    if m >= queries:
        return
    key_start, keys = extent(cu_k_ptr, b, sequences, key_tokens, 0, PACKED)
    row = tl.cast(b * heads + h, tl.int64) * queries + m + tl.arange(0, M)
    if PACKED:
        row = tl.cast(h, tl.int64) * query_tokens + start + m + tl.arange(0, M)
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    slope = 0.0
    if ALIBI:
        at = alibi_ptr + tl.cast(b, tl.int64) * alibi_b + tl.cast(h, tl.int64) * alibi_h
        slope = tl.load(at, mask=(b >= 0) & (b < sequences), other=0.0).to(tl.float32)
    if FORMAT != "":  # q, k and v are codes; of packed sequences b may be none
        of = tl.maximum(tl.minimum(b, sequences - 1), 0)
        scale *= tl.load(q_scale_ptr + of * q_scale_b + h * q_scale_h)
        scale *= tl.load(k_scale_ptr + of * k_scale_b + h // group * k_scale_h)
        keep_scale *= tl.load(v_scale_ptr + of * v_scale_b + h // group * v_scale_h)
    q_ptr = base(q_ptr, b, h, start + m, q_b, q_h, q_s)
    k_ptr, v_ptr = (
        base(k_ptr, b, h // group, key_start, k_b, k_h, k_s),
        base(v_ptr, b, h // group, key_start, v_b, v_h, v_s),
    )
    mask_ptr, bias_ptr = base(mask_ptr, b, h, b, mask_b, mask_h, 0), base(bias_ptr, b, h, b, bias_b, bias_h, 0)
    q = read(q_ptr, q_s, q_d, queries - m, M, D, D_COLS, True)
    if FORMAT == "fp8_by_bits":
        q = widened(q, tl.float16, FORMAT)
    k_tiles, v_tiles = k_ptr, v_ptr
    if TMA:  # rows behind the last key, and columns behind the last one, come as zeros
        k_tiles = tl.make_tensor_descriptor(k_ptr, [keys, D], [k_s, 1], [N, D_COLS])
        v_tiles = tl.make_tensor_descriptor(v_ptr, [keys, DV], [v_s, 1], [N, DV_COLS])
    acc, total = tl.zeros([M, DV_COLS], tl.float32), tl.zeros([M], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    begin, inner, outer, end = visible(m, tl.minimum(queries - m, M), queries, keys, left, right, LEFT, RIGHT, N)
    for part in tl.static_range(3):
        if part == 1 or part == 2 or LEFT:
            first = begin if part == 0 else inner if part == 1 else outer
            stop = inner if part == 0 else outer if part == 1 else end
            acc, total, peak = attend(
                acc, total, peak, q, k_ptr, v_ptr, k_tiles, v_tiles, bias_ptr, mask_ptr, first, stop, b, h, m, queries, keys,
                left, right, scale, softcap, slope, k_s, k_d, v_s, v_d, bias_s, bias_n, mask_s, mask_n, row, pitch, seed,
                offset, last, D, DV, M, N, D_COLS, DV_COLS, PLAIN, SOFTCAP, ALIBI, BIAS, MASK, SCORE, DROPOUT, LEFT, RIGHT,
                part != 1, ACCURATE, TMA, FORMAT,
            )  # fmt: skip
    unit = LOG2E
    if PLAIN:
        peak, unit = peak * (scale * LOG2E), 1.0
    if SINKS:  # one more logit of the row, of a key without a value
        sink = tl.load(sinks_ptr + h).to(tl.float32) * (LOG2E if PLAIN else 1.0)
        new = tl.maximum(peak, sink)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2((peak - safe) * unit)
        total = total * shrink + tl.exp2((sink - safe) * unit)
        acc *= shrink[:, None]
        peak = new
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc * (keep_scale / total)[:, None]
    write(base(o_ptr, b, h, start + m, o_b, o_h, o_s), acc, o_s, o_d, queries - m, M, DV, DV_COLS)
    inside = m + tl.arange(0, M) < queries
    tl.store(peak_ptr + row, peak, mask=inside)
    tl.store(log_sum_ptr + row, tl.log2(total), mask=inside)
