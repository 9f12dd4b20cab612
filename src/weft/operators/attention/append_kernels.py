"""New keys and values into a cache: rotated, quantised and written where their positions lie, in one launch."""

import triton
import triton.language as tl

from weft.operators.quantization.kernels import encode

# B batch, T new tokens of a sequence, H heads of q, G heads of k and v, D head dim, R rotated columns


@triton.jit
def rotated(
    ptr, inside, col, col_stride, cos_ptr, sin_ptr, cos_d, sin_d, norm_ptr, rstd,
    R: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Columns ``col`` [1, COLS] of heads [ROWS, 1] in fp32: with NORM times 1 / deviation and weight, then the first R of them
    rotated by the angles of a token, or of each row's token."""
    x = tl.load(ptr + col.to(tl.int64) * col_stride, mask=inside & (col < WIDTH), other=0.0).to(tl.float32)
    if NORM:
        x *= rstd * tl.load(norm_ptr + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    if R > 0:
        if INTERLEAVED:
            first, angle = col % 2 == 0, col // 2
            other = tl.where(first, col + 1, col - 1)
        else:
            first, angle = col < R // 2, col % (R // 2)
            other = tl.where(first, col + R // 2, col - R // 2)
            if R % 16 == 0:  # which the compiler does not see: neighbours' others are neighbours
                other = tl.max_contiguous(tl.multiple_of(other, (1, 8)), (1, 8))
        turned = col < R
        y = tl.load(ptr + other.to(tl.int64) * col_stride, mask=inside & turned, other=0.0).to(tl.float32)
        if NORM:
            y *= rstd * tl.load(norm_ptr + other, mask=turned, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + angle * cos_d, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle * sin_d, mask=turned, other=0.0).to(tl.float32)
        x = tl.where(first, x * cos - y * sin, x * cos + y * sin)
    return x


@triton.jit
def put(
    x, ptr, inside, col_stride, scale_ptr, h, scale_h,
    WIDTH: tl.constexpr, COLS: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Writes heads of a token, as codes of x / scale where the cache holds codes."""
    col = tl.arange(0, COLS)[None, :]
    mask = inside & (col < WIDTH)
    if FORMAT != "":
        scale = tl.load(scale_ptr + h * scale_h, mask=inside, other=1.0)
        x = encode(tl.div_rn(x, scale + tl.zeros_like(x)), 0, FORMAT, False, HARDWARE)
    tl.store(ptr + col.to(tl.int64) * col_stride, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "q_heads", "heads", "capacity", "pages", "q_blocks", "blocks"])
def append(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, q_ptr, q_out_ptr, lengths_ptr, table_ptr, cos_ptr, sin_ptr, k_scale_ptr,
    v_scale_ptr,
    tokens, q_heads, heads, capacity, pages, q_blocks, blocks,
    k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, kc_b, kc_h, kc_s, kc_d, vc_b, vc_h, vc_s, vc_d, q_b, q_h, q_t, q_d,
    qo_b, qo_h, qo_t, qo_d, table_b, table_s, cos_s, cos_d, sin_s, sin_d, k_scale_h, v_scale_h,
    D: tl.constexpr, DV: tl.constexpr, D_COLS: tl.constexpr, DV_COLS: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A program has ROWS heads of one new token: of q, which is rotated alone, of k or of v. Tokens without a place (a negative
    position, one beyond the cache, a page that is none) are not written."""
    token, block = tl.program_id(0), tl.program_id(1)
    b, t = token // tokens, token % tokens
    position = tl.load(lengths_ptr + b) - tokens + t
    there = (position >= 0) & (position < capacity)
    safe = tl.minimum(tl.maximum(position, 0), capacity - 1)
    cos_ptr += safe.to(tl.int64) * cos_s
    sin_ptr += safe.to(tl.int64) * sin_s
    outer, row = tl.cast(b, tl.int64), tl.cast(safe, tl.int64)
    if PAGE > 0:
        outer = tl.load(table_ptr + tl.cast(b, tl.int64) * table_b + safe // PAGE * table_s).to(tl.int64)
        there &= (outer >= 0) & (outer < pages)
        row = tl.cast(safe % PAGE, tl.int64)
    b = tl.cast(b, tl.int64)
    cols = tl.arange(0, D_COLS)[None, :]
    if block < q_blocks:
        h = (block * ROWS + tl.arange(0, ROWS))[:, None]
        inside = h < q_heads
        x = rotated(q_ptr + b * q_b + h.to(tl.int64) * q_h + tl.cast(t, tl.int64) * q_t, inside, cols, q_d, cos_ptr,
                    sin_ptr, cos_d, sin_d, q_ptr, 1.0, R, D, INTERLEAVED, False)  # fmt: skip
        q_at = q_out_ptr + b * qo_b + h.to(tl.int64) * qo_h + tl.cast(t, tl.int64) * qo_t
        put(x, q_at, inside, qo_d, k_scale_ptr, h, 0, D, D_COLS, "", False)
    elif block < q_blocks + blocks:
        h = ((block - q_blocks) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (h < heads) & there
        x = rotated(k_ptr + b * k_b + h.to(tl.int64) * k_h + tl.cast(t, tl.int64) * k_t, inside, cols, k_d, cos_ptr,
                    sin_ptr, cos_d, sin_d, k_ptr, 1.0, R, D, INTERLEAVED, False)  # fmt: skip
        k_at = k_cache_ptr + outer * kc_b + h.to(tl.int64) * kc_h + row * kc_s
        put(x, k_at, inside, kc_d, k_scale_ptr, h, k_scale_h, D, D_COLS, FORMAT, HARDWARE)
    else:  # y, not x: the compiler wants a name that both branches set in one shape
        h = ((block - q_blocks - blocks) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (h < heads) & there
        v_cols = tl.arange(0, DV_COLS)[None, :]
        y = rotated(v_ptr + b * v_b + h.to(tl.int64) * v_h + tl.cast(t, tl.int64) * v_t, inside, v_cols, v_d, cos_ptr,
                    sin_ptr, cos_d, sin_d, v_ptr, 1.0, 0, DV, INTERLEAVED, False)  # fmt: skip
        v_at = v_cache_ptr + outer * vc_b + h.to(tl.int64) * vc_h + row * vc_s
        put(y, v_at, inside, vc_d, v_scale_ptr, h, v_scale_h, DV, DV_COLS, FORMAT, HARDWARE)
