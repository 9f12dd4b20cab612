"""The gradient of attention, with the probabilities made again (Dao et al. 2022): of each score s, with p = exp(s - lse),

    ds = p (dp - delta),  dp = do · v,  delta = do · o - dlse
    dq = scale Σ ds k,  dk = scale Σ ds q,  dv = Σ p do,  dbias = Σ ds,  dsink = -Σ exp(sink - lse) delta

One kernel by tiles of keys, for all query heads of a group, makes dk and dv; one by tiles of queries dq; one by tiles of the
bias its gradient. No program adds to another's result: no atomics, the same bits every time.
"""

import triton
import triton.language as tl

from weft.operators.attention.kernels import (
    LENGTHS,
    LOG2E,
    base,
    beside,
    extent,
    kept,
    read,
    scores,
    tile_of,
    visible,
    write,
)

# B batch (or N sequences), H heads of q, G heads of k and v, M queries and N keys of a tile, D and DV head dims


@triton.jit(do_not_specialize=LENGTHS)
def deltas(
    o_ptr, do_ptr, peak_ptr, log_sum_ptr, base_ptr, delta_ptr, cu_q_ptr, slots, heads, sequences, query_tokens,
    o_b, o_h, o_s, o_d, do_b, do_h, do_s, do_d,
    DV: tl.constexpr, DV_COLS: tl.constexpr, M: tl.constexpr, PLAIN: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Of M rows delta = do · o, and the base of their exponents: peak, with log_sum in it if PLAIN, inf where no key is seen:
    exponents are -inf then; [B, H, Sq], or [H, total]."""
    b, h, m, start, queries = tile_of(cu_q_ptr, slots, heads, sequences, query_tokens, M, PACKED, False)
    o = read(base(o_ptr, b, h, start + m, o_b, o_h, o_s), o_s, o_d, queries - m, M, DV, DV_COLS, True)
    do = read(base(do_ptr, b, h, start + m, do_b, do_h, do_s), do_s, do_d, queries - m, M, DV, DV_COLS, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    inside = m + tl.arange(0, M) < queries
    row = tl.cast(b * heads + h, tl.int64) * queries + m + tl.arange(0, M)
    if PACKED:
        row = tl.cast(h, tl.int64) * query_tokens + start + m + tl.arange(0, M)
    tl.store(delta_ptr + row, delta, mask=inside)
    peak = tl.load(peak_ptr + row, mask=inside, other=0.0)
    exponent = peak
    if PLAIN:
        exponent += tl.load(log_sum_ptr + row, mask=inside, other=0.0)
    tl.store(base_ptr + row, tl.where(peak == float("-inf"), float("inf"), exponent), mask=inside)


@triton.jit
def statistics(peak_ptr, log_sum_ptr, delta_ptr, left, M: tl.constexpr, PLAIN: tl.constexpr, CHECK: tl.constexpr):
    """Of M rows: peak (inf behind the last one: exponents are -inf then), log_sum (which peak holds if PLAIN) and delta."""
    m = tl.arange(0, M)
    log_sum = 0.0
    if CHECK:
        peak = tl.load(peak_ptr + m, mask=m < left, other=float("inf"))
        delta = tl.load(delta_ptr + m, mask=m < left, other=0.0)
        if not PLAIN:
            log_sum = tl.load(log_sum_ptr + m, mask=m < left, other=0.0)
    else:
        peak, delta = tl.load(peak_ptr + m), tl.load(delta_ptr + m)
        if not PLAIN:
            log_sum = tl.load(log_sum_ptr + m)
    return peak, log_sum, delta


@triton.jit
def probabilities(s, peak, log_sum, scale, ROW: tl.constexpr, PLAIN: tl.constexpr):
    """Of scores whose rows are their dimension ROW."""
    peak = tl.expand_dims(peak, 1 - ROW)
    if PLAIN:
        return tl.exp2(s * (scale * LOG2E) - peak)
    else:
        return tl.exp2((s - peak) * LOG2E - tl.expand_dims(log_sum, 1 - ROW))


@triton.jit
def of_keys(
    dk, dv, k, v, q_ptr, do_ptr, bias_ptr, mask_ptr, peak_ptr, log_sum_ptr, delta_ptr, begin, end, b, h, n,
    queries, keys, left, right, scale, softcap, slope, keep_scale, q_s, q_d, do_s, do_d, bias_s, bias_n, mask_s, mask_n, row,
    pitch, seed, offset, last,
    D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    EDGE: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """What the queries from ``begin`` to ``end`` of one head add to dk (unscaled) and dv; tiles are transposed, [N, M]."""
    PRECISION: tl.constexpr = "tf32x3" if ACCURATE and k.shape[1] <= 128 and v.shape[1] <= 128 else "ieee"
    j = n + tl.arange(0, N)[:, None]
    for m in tl.range(begin, end, M):
        q = read(q_ptr + tl.cast(m, tl.int64) * q_s, q_s, q_d, queries - m, M, D, D_COLS, EDGE)
        peak, log_sum, delta = statistics(peak_ptr + m, log_sum_ptr + m, delta_ptr + m, queries - m, M, PLAIN, EDGE)
        i = m + tl.arange(0, M)[None, :]
        bias, seen = beside(
            bias_ptr, mask_ptr, m, n, queries, keys, bias_s, bias_n, mask_s, mask_n, M, N, BIAS, MASK, True, EDGE
        )
        qk = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        s, inner, outer = scores(
            qk, bias, seen, b, h, i, j, queries, keys, left, right, scale, softcap, slope, PLAIN, SOFTCAP, ALIBI, BIAS, MASK,
            SCORE, SCORE_GRADIENT, LEFT, RIGHT, EDGE, True, ACCURATE,
        )  # fmt: skip
        p = probabilities(s, peak, log_sum, scale, 1, PLAIN)
        do = read(do_ptr + tl.cast(m, tl.int64) * do_s, do_s, do_d, queries - m, M, DV, DV_COLS, EDGE)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if DROPOUT:
            keep = tl.trans(kept(row + m + tl.arange(0, M), n, pitch, seed, offset, last, M, N))
            dv = tl.dot(tl.where(keep, p, 0.0).to(do.dtype), do, dv, input_precision=PRECISION)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        else:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :]) * outer * inner
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def key_gradients(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, peak_ptr, log_sum_ptr, delta_ptr, mask_ptr, bias_ptr, alibi_ptr, cu_q_ptr,
    cu_k_ptr, seed_ptr, seed: tl.uint64, offset: tl.uint64,
    slots, heads, group, sequences, query_tokens, key_tokens, left, right, pitch, last: tl.uint32,
    scale: tl.float32, softcap: tl.float32, keep_scale: tl.float32,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, do_b, do_h, do_s, do_d, dk_b, dk_h, dk_s, dk_d,
    dv_b, dv_h, dv_s, dv_d,
    mask_b, mask_h, mask_s, mask_n, bias_b, bias_h, bias_s, bias_n, alibi_b, alibi_h,
    D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, DROPOUT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, PACKED: tl.constexpr, SEED_IN_MEMORY: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """A program makes N rows of dk and dv of one head of k; it walks the group's query heads, and of each the queries that see
    a key."""
    b, g, n, start, keys = tile_of(cu_k_ptr, slots, heads // group, sequences, key_tokens, N, PACKED, False)
    if n >= keys:
        return
    query_start, queries = extent(cu_q_ptr, b, sequences, query_tokens, 0, PACKED)
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    k = read(base(k_ptr, b, g, start + n, k_b, k_h, k_s), k_s, k_d, keys - n, N, D, D_COLS, True)
    v = read(base(v_ptr, b, g, start + n, v_b, v_h, v_s), v_s, v_d, keys - n, N, DV, DV_COLS, True)
    dk, dv = tl.zeros([N, D_COLS], tl.float32), tl.zeros([N, DV_COLS], tl.float32)
    # the other way round: a key is seen by queries from `right` before it to `left` behind it
    begin, first, outer, end = visible(n, tl.minimum(keys - n, N), keys, queries, right, left, RIGHT, LEFT, M)
    for h in range(g * group, (g + 1) * group):
        row = tl.cast(b * heads + h, tl.int64) * queries
        if PACKED:
            row = tl.cast(h, tl.int64) * query_tokens + query_start
        slope = 0.0
        if ALIBI:
            slopes = alibi_ptr + tl.cast(b, tl.int64) * alibi_b + tl.cast(h, tl.int64) * alibi_h
            slope = tl.load(slopes, mask=(b >= 0) & (b < sequences), other=0.0).to(tl.float32)
        at, do_at = base(q_ptr, b, h, query_start, q_b, q_h, q_s), base(do_ptr, b, h, query_start, do_b, do_h, do_s)
        mask_at, bias_at = base(mask_ptr, b, h, b, mask_b, mask_h, 0), base(bias_ptr, b, h, b, bias_b, bias_h, 0)
        for part in tl.static_range(3):
            if part == 1 or part == 2 or RIGHT:
                m = begin if part == 0 else first if part == 1 else outer
                stop = first if part == 0 else outer if part == 1 else end
                dk, dv = of_keys(
                    dk, dv, k, v, at, do_at, bias_at, mask_at, peak_ptr + row, log_sum_ptr + row,
                    delta_ptr + row, m, stop, b, h, n, queries, keys, left, right, scale, softcap, slope, keep_scale, q_s, q_d,
                    do_s, do_d, bias_s, bias_n, mask_s, mask_n, row, pitch, seed, offset, last, D, DV, M, N, D_COLS, DV_COLS,
                    PLAIN, SOFTCAP, ALIBI, BIAS, MASK, SCORE, SCORE_GRADIENT, DROPOUT, LEFT, RIGHT, part != 1, ACCURATE,
                )  # fmt: skip
    write(base(dk_ptr, b, g, start + n, dk_b, dk_h, dk_s), dk * scale, dk_s, dk_d, keys - n, N, D, D_COLS)
    write(base(dv_ptr, b, g, start + n, dv_b, dv_h, dv_s), dv * keep_scale, dv_s, dv_d, keys - n, N, DV, DV_COLS)


@triton.jit
def score_gradients(
    q, do, k, v, peak, log_sum, delta, bias_ptr, mask_ptr, b, h, m, n, queries, keys, left, right, scale, softcap, slope,
    keep_scale, bias_s, bias_n, mask_s, mask_n, row, pitch, seed, offset, last,
    M: tl.constexpr, N: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, DROPOUT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, EDGE: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """[M, N]: the gradient of the score that the bias is added to, and the soft cap's derivative behind it."""
    PRECISION: tl.constexpr = "tf32x3" if ACCURATE and q.shape[1] <= 128 and v.shape[1] <= 128 else "ieee"
    i, j = m + tl.arange(0, M)[:, None], n + tl.arange(0, N)[None, :]
    bias, seen = beside(
        bias_ptr, mask_ptr, m, n, queries, keys, bias_s, bias_n, mask_s, mask_n, M, N, BIAS, MASK, False, EDGE
    )
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s, inner, outer = scores(
        qk, bias, seen, b, h, i, j, queries, keys, left, right, scale, softcap, slope, PLAIN, SOFTCAP, ALIBI, BIAS, MASK, SCORE,
        SCORE_GRADIENT, LEFT, RIGHT, EDGE, True, ACCURATE,
    )  # fmt: skip
    p = probabilities(s, peak, log_sum, scale, 0, PLAIN)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        dp = tl.where(kept(row, n, pitch, seed, offset, last, M, N), dp * keep_scale, 0.0)
    return p * (dp - delta[:, None]) * outer, inner


@triton.jit
def of_queries(
    dq, q, do, peak, log_sum, delta, k_ptr, v_ptr, k_tiles, v_tiles, bias_ptr, mask_ptr, begin, end, b, h, m, queries, keys,
    left, right, scale, softcap, slope, keep_scale, k_s, k_d, v_s, v_d, bias_s, bias_n, mask_s, mask_n, row, pitch, seed,
    offset, last,
    D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    EDGE: tl.constexpr, ACCURATE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """What the keys from ``begin`` to ``end`` add to dq (unscaled)."""
    PRECISION: tl.constexpr = "tf32x3" if ACCURATE and q.shape[1] <= 128 and do.shape[1] <= 128 else "ieee"
    if not TMA:  # as in forward
        begin, end = tl.cast(begin, tl.int64), tl.cast(end, tl.int64)
    for at in tl.range(begin, end, N):
        n = tl.cast(at, tl.int32)
        k = k_tiles.load([n, 0]) if TMA else read(k_ptr + at * k_s, k_s, k_d, keys - n, N, D, D_COLS, EDGE)
        v = v_tiles.load([n, 0]) if TMA else read(v_ptr + at * v_s, v_s, v_d, keys - n, N, DV, DV_COLS, EDGE)
        ds, inner = score_gradients(
            q, do, k, v, peak, log_sum, delta, bias_ptr, mask_ptr, b, h, m, n, queries, keys, left, right, scale, softcap,
            slope, keep_scale, bias_s, bias_n, mask_s, mask_n, row, pitch, seed, offset, last, M, N, PLAIN, SOFTCAP, ALIBI,
            BIAS, MASK, SCORE, SCORE_GRADIENT, DROPOUT, LEFT, RIGHT, EDGE, ACCURATE,
        )  # fmt: skip
        dq = tl.dot((ds * inner).to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=LENGTHS)
def query_gradients(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, peak_ptr, log_sum_ptr, delta_ptr, mask_ptr, bias_ptr, alibi_ptr, cu_q_ptr, cu_k_ptr,
    seed_ptr, seed: tl.uint64, offset: tl.uint64,
    slots, heads, group, sequences, query_tokens, key_tokens, left, right, pitch, last: tl.uint32,
    scale: tl.float32, softcap: tl.float32, keep_scale: tl.float32,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, do_b, do_h, do_s, do_d, dq_b, dq_h, dq_s, dq_d,
    mask_b, mask_h, mask_s, mask_n, bias_b, bias_h, bias_s, bias_n, alibi_b, alibi_h,
    D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr,
    PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr, DROPOUT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, PACKED: tl.constexpr, SEED_IN_MEMORY: tl.constexpr, ACCURATE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A program makes M rows of one head's dq; it walks the keys that they see."""
    b, h, m, start, queries = tile_of(cu_q_ptr, slots, heads, sequences, query_tokens, M, PACKED, RIGHT)
    if m >= queries:
        return
    key_start, keys = extent(cu_k_ptr, b, sequences, key_tokens, 0, PACKED)
    first = tl.cast(b * heads + h, tl.int64) * queries + m
    if PACKED:
        first = tl.cast(h, tl.int64) * query_tokens + start + m
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    slope = 0.0
    if ALIBI:
        at = alibi_ptr + tl.cast(b, tl.int64) * alibi_b + tl.cast(h, tl.int64) * alibi_h
        slope = tl.load(at, mask=(b >= 0) & (b < sequences), other=0.0).to(tl.float32)
    k_ptr, v_ptr = (
        base(k_ptr, b, h // group, key_start, k_b, k_h, k_s),
        base(v_ptr, b, h // group, key_start, v_b, v_h, v_s),
    )
    k_tiles, v_tiles = k_ptr, v_ptr
    if TMA:
        k_tiles = tl.make_tensor_descriptor(k_ptr, [keys, D], [k_s, 1], [N, D_COLS])
        v_tiles = tl.make_tensor_descriptor(v_ptr, [keys, DV], [v_s, 1], [N, DV_COLS])
    mask_ptr, bias_ptr = base(mask_ptr, b, h, b, mask_b, mask_h, 0), base(bias_ptr, b, h, b, bias_b, bias_h, 0)
    q = read(base(q_ptr, b, h, start + m, q_b, q_h, q_s), q_s, q_d, queries - m, M, D, D_COLS, True)
    do = read(base(do_ptr, b, h, start + m, do_b, do_h, do_s), do_s, do_d, queries - m, M, DV, DV_COLS, True)
    peak, log_sum, delta = statistics(
        peak_ptr + first, log_sum_ptr + first, delta_ptr + first, queries - m, M, PLAIN, True
    )
    row = first + tl.arange(0, M)
    dq = tl.zeros([M, D_COLS], tl.float32)
    begin, inner, outer, end = visible(m, tl.minimum(queries - m, M), queries, keys, left, right, LEFT, RIGHT, N)
    for part in tl.static_range(3):
        if part == 1 or part == 2 or LEFT:
            n = begin if part == 0 else inner if part == 1 else outer
            stop = inner if part == 0 else outer if part == 1 else end
            dq = of_queries(
                dq, q, do, peak, log_sum, delta, k_ptr, v_ptr, k_tiles, v_tiles, bias_ptr, mask_ptr, n, stop, b, h, m, queries,
                keys, left, right, scale, softcap, slope, keep_scale, k_s, k_d, v_s, v_d, bias_s, bias_n, mask_s, mask_n, row,
                pitch, seed, offset, last, D, DV, M, N, D_COLS, DV_COLS, PLAIN, SOFTCAP, ALIBI, BIAS, MASK, SCORE,
                SCORE_GRADIENT, DROPOUT, LEFT, RIGHT, part != 1, ACCURATE, TMA,
            )  # fmt: skip
    write(base(dq_ptr, b, h, start + m, dq_b, dq_h, dq_s), dq * scale, dq_s, dq_d, queries - m, M, D, D_COLS)


@triton.jit(do_not_specialize=[*LENGTHS, "batches", "bias_batches", "bias_heads"])
def bias_gradient(
    q_ptr, k_ptr, v_ptr, do_ptr, dbias_ptr, peak_ptr, log_sum_ptr, delta_ptr, mask_ptr, bias_ptr, alibi_ptr, seed_ptr,
    seed: tl.uint64, offset: tl.uint64,
    batches, heads, group, query_tokens, key_tokens, left, right, pitch, last: tl.uint32, bias_batches, bias_heads,
    scale: tl.float32, softcap: tl.float32, keep_scale: tl.float32,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, do_b, do_h, do_s, do_d, db_b, db_h, db_s, db_n,
    mask_b, mask_h, mask_s, mask_n, bias_b, bias_h, bias_s, bias_n, alibi_b, alibi_h,
    D: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, SCORE_GRADIENT: tl.constexpr,
    DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SEED_IN_MEMORY: tl.constexpr, ACCURATE: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COLUMN: tl.constexpr,
):  # fmt: skip
    """A program makes a tile of the bias's gradient: it walks all that the tile was broadcast to, batches, heads, and with
    ONE_ROW queries, with ONE_COLUMN keys."""
    across = 1 if ONE_COLUMN else tl.cdiv(key_tokens, N)
    down = 1 if ONE_ROW else tl.cdiv(query_tokens, M)
    program = tl.program_id(0)
    n0, m0 = program % across * N, program // across % down * M
    of_head, of_batch = program // (across * down) % bias_heads, program // (across * down) // bias_heads
    if SEED_IN_MEMORY:
        seed = tl.load(seed_ptr)
    m1 = query_tokens if ONE_ROW else tl.minimum(m0 + M, query_tokens)
    acc = tl.zeros([M, N], tl.float32)
    for b in range(of_batch, batches, bias_batches):  # one of the bias's, or all where it has one
        for h in range(of_head, heads, bias_heads):
            slope = 0.0
            if ALIBI:
                slope = tl.load(alibi_ptr + b * alibi_b + h * alibi_h).to(tl.float32)
            k_at, v_at = base(k_ptr, b, h // group, b, k_b, k_h, 0), base(v_ptr, b, h // group, b, v_b, v_h, 0)
            mask_at, bias_at = base(mask_ptr, b, h, b, mask_b, mask_h, 0), base(bias_ptr, b, h, b, bias_b, bias_h, 0)
            for m in range(m0, m1, M):
                first = tl.cast(b * heads + h, tl.int64) * query_tokens + m
                q = read(base(q_ptr, b, h, m, q_b, q_h, q_s), q_s, q_d, query_tokens - m, M, D, D_COLS, True)
                do = read(base(do_ptr, b, h, m, do_b, do_h, do_s), do_s, do_d, query_tokens - m, M, DV, DV_COLS, True)
                peak, log_sum, delta = statistics(
                    peak_ptr + first, log_sum_ptr + first, delta_ptr + first, query_tokens - m, M, False, True
                )
                rows = tl.minimum(query_tokens - m, M)
                begin, _inner, _outer, end = visible(m, rows, query_tokens, key_tokens, left, right, LEFT, RIGHT, N)
                if not ONE_COLUMN:
                    begin, end = tl.maximum(begin, n0), tl.minimum(end, n0 + N)
                for n in range(begin, end, N):
                    k = read(k_at + tl.cast(n, tl.int64) * k_s, k_s, k_d, key_tokens - n, N, D, D_COLS, True)
                    v = read(v_at + tl.cast(n, tl.int64) * v_s, v_s, v_d, key_tokens - n, N, DV, DV_COLS, True)
                    ds, _slope = score_gradients(
                        q, do, k, v, peak, log_sum, delta, bias_at, mask_at, b, h, m, n, query_tokens, key_tokens, left, right,
                        scale, softcap, slope, keep_scale, bias_s, bias_n, mask_s, mask_n, first + tl.arange(0, M), pitch,
                        seed, offset, last, M, N, False, SOFTCAP, ALIBI, True, MASK, SCORE, SCORE_GRADIENT, DROPOUT, LEFT,
                        RIGHT, True, ACCURATE,
                    )  # fmt: skip
                    acc += ds
    i, j = m0 + tl.arange(0, M)[:, None], n0 + tl.arange(0, N)[None, :]
    inside = (i < query_tokens) & (j < key_tokens)
    if ONE_ROW:
        acc, i, inside = tl.sum(acc, 0)[None, :], tl.zeros([1, 1], tl.int32), j < key_tokens
    if ONE_COLUMN:
        acc, j = tl.sum(acc, 1)[:, None], tl.zeros([1, 1], tl.int32)
        inside = i < query_tokens
    at = (
        base(dbias_ptr, of_batch, of_head, of_head, db_b, db_h, 0)
        + tl.cast(i, tl.int64) * db_s
        + tl.cast(j, tl.int64) * db_n
    )
    tl.store(at, acc.to(dbias_ptr.dtype.element_ty), mask=inside)
