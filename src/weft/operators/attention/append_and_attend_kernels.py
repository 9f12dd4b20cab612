"""A step of decoding in one launch: new tokens are rotated, written to the cache and attended to, and parts of keys merged.

Programs divide the keys as those of ``decode_kernels`` do. The one with a sequence's last part also has its new token: it
rotates it, writes it, and begins its sums with it, from registers. No program reads what another writes: the others stop
ahead of the new token. Of several parts, the program that finishes last (by a counter of its sequence and head) merges all in
the order of the keys, so the bits do not depend on which one that is.
"""

import triton
import triton.language as tl

from weft.operators.attention.append_kernels import rotated
from weft.operators.attention.decode_kernels import (
    UNIT,
    finish,
    leave,
    part_of,
    power_of,
    row_addresses,
    walk,
)
from weft.operators.attention.kernels import LOG2E, base
from weft.operators.quantization.kernels import decode, encode

# B batch, H heads of q, G heads of the cache, M rows (heads that share keys) and N keys of a tile


@triton.jit
def inverse_deviation(ptr, inside, col_stride, eps, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of rows [ROWS, 1]."""
    col = tl.arange(0, COLS)[None, :]
    x = tl.load(ptr + col.to(tl.int64) * col_stride, mask=inside & (col < WIDTH), other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]


@triton.jit
def halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Even and odd columns."""
    return tl.split(tl.reshape(x, [ROWS, COLS // 2, 2]))


@triton.jit
def stored(
    x, cache_ptr, at, inside, cache_d, scale_ptr, WIDTH: tl.constexpr, COLS: tl.constexpr, CODES: tl.constexpr,
    HARDWARE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Writes a token's row [1, COLS], in fp32, to the cache (to pairs of codes, as int16 are), and returns the numbers that the
    cache then holds, in fp32."""
    like = cache_ptr.dtype.element_ty
    col = tl.arange(0, COLS)[None, :]
    if CODES != "":
        code = encode(tl.div_rn(x, tl.load(scale_ptr) + tl.zeros_like(x)), 0, CODES, False, HARDWARE)
        if PAIRS:
            even, odd = halves(code, 1, COLS)
            pair = tl.arange(0, COLS // 2)[None, :]
            tl.store(
                cache_ptr + at + pair * cache_d,
                even.to(tl.int16) | (odd.to(tl.int16) << 8),
                mask=inside & (pair < WIDTH // 2),
            )
        else:
            tl.store(cache_ptr + at + col * cache_d, code.to(like), mask=inside & (col < WIDTH))
        return decode(code, CODES)
    else:
        tl.store(cache_ptr + at + col * cache_d, x.to(like), mask=inside & (col < WIDTH))
        return x.to(like).to(tl.float32)


@triton.jit
def merge(parts_ptr, step, parts, KEPT: tl.constexpr, DV_COLS: tl.constexpr, PARTS: tl.constexpr):
    """The sums of all parts, [KEPT, DV_COLS], in the order of the keys; loads of PARTS of them are in flight at once, and go
    around the first cache, since other programs have written them."""
    kept, col = tl.arange(0, KEPT), tl.arange(0, DV_COLS)[None, :]
    acc, total = tl.zeros([KEPT, DV_COLS], tl.float32), tl.zeros([KEPT], tl.float32)
    peak = tl.full([KEPT], float("-inf"), tl.float32)
    for n in tl.range(0, parts, PARTS):
        for part in tl.static_range(PARTS):
            at, there = parts_ptr + (n + part) * step, n + part < parts
            of_part = tl.load(at + KEPT * DV_COLS + kept, mask=there, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(at + KEPT * (DV_COLS + 1) + kept, mask=there, other=0.0, cache_modifier=".cg")
            values = tl.load(at + (kept * DV_COLS)[:, None] + col, mask=there, other=0.0, cache_modifier=".cg")
            new = tl.maximum(peak, of_part)
            safe = tl.where(new == float("-inf"), 0.0, new)
            weight, shrink = tl.exp2((of_part - safe) * LOG2E), tl.exp2((peak - safe) * LOG2E)
            acc = acc * shrink[:, None] + values * weight[:, None]
            total = total * shrink + totals * weight
            peak = new
    return acc, peak, total


@triton.jit(do_not_specialize=["batches", "groups", "group", "capacity", "pages", "splits", "least", "tiles", "left"])
def append_and_attend(
    q_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, o_ptr, parts_ptr, counters_ptr, table_ptr, lengths_ptr, cos_ptr, sin_ptr,
    q_norm_ptr, k_norm_ptr, k_scale_ptr, v_scale_ptr,
    batches, groups, group, capacity, pages, splits, least, tiles, left, scale: tl.float32, eps: tl.float32,
    q_b, q_h, q_d, kn_b, kn_h, kn_d, vn_b, vn_h, vn_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, o_b, o_h, o_d, table_b, table_s,
    cos_s, cos_d, sin_s, sin_d, k_scale_h, v_scale_h,
    D: tl.constexpr, DV: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    KEPT: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr, ALIKE: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, CODES: tl.constexpr, HARDWARE: tl.constexpr,
    LEFT: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr, ACCURATE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One part of a sequence's keys for M rows of one head of the cache; of the last part also its new token. FORMAT says how
    codes become numbers, CODES how numbers become codes; PAIRS as in ``attend_part``."""
    program = tl.program_id(0)
    tile, g, slot = program % tiles, program // tiles % groups, program // tiles // groups
    b, length, part, parts, start, stop = part_of(
        slot, tile, lengths_ptr, lengths_ptr, batches, group, 1, capacity, splits, least, left, 0, M, N, LEFT, True, True,
        SPLIT,
    )  # fmt: skip
    if part >= parts:
        return
    position = tl.load(lengths_ptr + b) - 1  # of the new token
    safe, outer = tl.minimum(tl.maximum(position, 0), capacity - 1), tl.cast(b, tl.int64)
    cos_ptr += safe.to(tl.int64) * cos_s
    sin_ptr += safe.to(tl.int64) * sin_s
    table_ptr += outer * table_b
    last = part == parts - 1
    page = tl.load(table_ptr + safe // PAGE * table_s, mask=last, other=-1)
    there = last & (position >= 0) & (position < capacity) & (page >= 0) & (page < pages)
    page = tl.maximum(page, 0).to(tl.int64)
    k_row = k_new_ptr + outer * kn_b + g.to(tl.int64) * kn_h + tl.zeros([1, 1], tl.int64)
    v_row = v_new_ptr + outer * vn_b + g.to(tl.int64) * vn_h + tl.zeros([1, 1], tl.int64)
    row = tile * M + tl.arange(0, M)
    inside = row < group
    head, o_at, _ = row_addresses(b, g, row, groups, group, 1, o_b, o_h, 0)
    q_rows = q_ptr + (outer * q_b + head.to(tl.int64) * q_h)[:, None]
    rstd, k_rstd = 1.0, 1.0
    if NORM:
        rstd = inverse_deviation(q_rows, inside[:, None], q_d, eps, D, D_COLS)
        k_rstd = inverse_deviation(k_row, there, kn_d, eps, D, D_COLS)
    col, v_col = tl.arange(0, D_COLS)[None, :], tl.arange(0, DV_COLS)[None, :]
    q = rotated(
        q_rows, inside[:, None], col, q_d, cos_ptr, sin_ptr, cos_d, sin_d, q_norm_ptr, rstd, R, D, INTERLEAVED, NORM
    )
    k = rotated(k_row, there, col, kn_d, cos_ptr, sin_ptr, cos_d, sin_d, k_norm_ptr, k_rstd, R, D, INTERLEAVED, NORM)
    v = rotated(v_row, there, v_col, vn_d, cos_ptr, sin_ptr, cos_d, sin_d, k_norm_ptr, 1.0, 0, DV, INTERLEAVED, False)
    k_scale_ptr += g * k_scale_h
    v_scale_ptr += g * v_scale_h
    k_ptr, v_ptr = base(k_ptr, 0, g, 0, 0, k_h, 0), base(v_ptr, 0, g, 0, 0, v_h, 0)
    written = there & (tile == 0)
    k = stored(k, k_ptr, page * k_b + safe % PAGE * k_s, written, k_d, k_scale_ptr, D, D_COLS, CODES, HARDWARE, PAIRS)
    v = stored(v, v_ptr, page * v_b + safe % PAGE * v_s, written, v_d, v_scale_ptr, DV, DV_COLS, CODES, HARDWARE, PAIRS)
    v_scale = 1.0 / UNIT if HALF else 1.0
    if SCALED:
        scale *= tl.load(k_scale_ptr)
        v_scale *= tl.load(v_scale_ptr)
    q = q.to(q_ptr.dtype.element_ty)
    unit = 1.0
    if HALF:
        unit = power_of(q)[:, None]
        q = (q / unit).to(tl.float16)
    peak = tl.where(there, tl.sum(q.to(tl.float32) * k * unit, 1) * scale, float("-inf"))
    total = tl.where(there, 1.0, tl.zeros([M], tl.float32))
    acc = tl.where(there, v * (UNIT if HALF else 1.0), 0.0) + tl.zeros([M, DV_COLS], tl.float32)
    q_odd, acc_odd = q, acc
    if PAIRS:
        q, q_odd = halves(q, M, D_COLS)
        acc, acc_odd = halves(acc, M, DV_COLS)
    acc, acc_odd, peak, total = walk(
        acc, acc_odd, peak, total, q, q_odd, unit, start, tl.minimum(stop, position), k_ptr, v_ptr, table_ptr, b, g,
        (row // group)[:, None], 1, length, pages, left, 0, scale, 1.0, 0.0, k_b, k_s, k_d, v_b, v_s, v_d, table_s, D, DV,
        D_COLS, DV_COLS, N, PAGE, ALIKE, FORMAT, False, False, LEFT, False, HALF, ACCURATE, PAIRS,
    )  # fmt: skip
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    if parts == 1:
        finish(o_ptr, o_ptr, acc, peak, total, 0.0, v_scale, row, o_at, o_at, inside, o_d, DV, DV_COLS, False, False)
    elif SPLIT != "whole":
        leave(parts_ptr, program, acc, peak, total, M, KEPT, DV_COLS)
        tl.debug_barrier()  # the counter's thread speaks for all of the program
        counters_ptr += (b * groups + g) * tiles + tile
        if tl.atomic_add(counters_ptr, 1, sem="acq_rel") == parts - 1:
            tl.store(counters_ptr, 0)
            SIZE: tl.constexpr = KEPT * (DV_COLS + 2)
            of_first = parts_ptr + ((outer * splits * groups + g) * tiles + tile) * SIZE
            merged, peak_, total_ = merge(
                of_first, tl.cast(groups * tiles, tl.int64) * SIZE, parts, KEPT, DV_COLS, PARTS
            )
            row_ = tile * M + tl.arange(0, KEPT)
            _head, at_, _at = row_addresses(b, g, row_, groups, group, 1, o_b, o_h, 0)
            finish(o_ptr, o_ptr, merged, peak_, total_, 0.0, v_scale, row_, at_, at_, row_ < group, o_d, DV, DV_COLS, False,
                   False)  # fmt: skip
