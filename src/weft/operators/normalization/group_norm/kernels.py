"""Triton kernels for GroupNorm over x [B, C, S] of any strides, groups held in registers: read once, written once.

S stands for all spatial dimensions; a group is CG = C / G channels of one batch entry, CG * S elements. A program holds whole
groups, [ROWS, CHANNELS, SPACE]. Reads are marked ``evict_last`` (why: docs/notes/softmax.md). Arguments that a flag switches
off are never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.normalization.kernels import reciprocal_root

# ---- strides ---------------------------------------------------------------------------------------------------------


@triton.jit
def multiple(value, UNIT: tl.constexpr):
    """The same value; the compiler then knows that UNIT divides it, which 16-byte accesses need."""
    return value // UNIT * UNIT


@triton.jit
def known_sizes(CG, S, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """UNIT divides the extent of the axis of stride 1, DENSE (1: channels, 2: space)."""
    if DENSE == 2:
        return CG, multiple(S, UNIT)
    elif DENSE == 1:
        return multiple(CG, UNIT), S
    else:
        return CG, S


@triton.jit
def known_strides(b, c, s, UNIT: tl.constexpr, DENSE: tl.constexpr):
    """And the other axes' strides."""
    if DENSE == 2:
        return multiple(b, UNIT), multiple(c, UNIT), s
    elif DENSE == 1:
        return multiple(b, UNIT), c, multiple(s, UNIT)
    else:
        return b, c, s


@triton.jit
def write(ptr, value, inside):
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=inside)


# ---- kernels ---------------------------------------------------------------------------------------------


@triton.jit
def held_groups(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, G, CG, S, n, x_b, x_c, x_s, y_b, y_c, y_s, w_c, b_c, eps,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    SAVED: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) * rstd * w + b for the ROWS groups from ``program * ROWS`` on; group m is group m % G of batch entry
    m // G. n = CG * S; with SAVED, mean and rstd (fp32 [M]) are written."""
    CG, S = known_sizes(CG, S, UNIT, DENSE)
    x_b, x_c, x_s = known_strides(x_b, x_c, x_s, UNIT, DENSE)
    y_b, y_c, y_s = known_strides(y_b, y_c, y_s, UNIT, DENSE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # int32: so the divisions are the cheaper ones
    c = tl.arange(0, CHANNELS)[None, :]
    s = tl.arange(0, SPACE)[None, None, :]
    there = (row < M)[:, None] & (c < CG)
    inside = there[:, :, None] & (s < S)
    channel = (row % G).to(tl.int64)[:, None] * CG + c  # [ROWS, CHANNELS]
    batch = (row // G).to(tl.int64)[:, None]
    at = x_ptr + (batch * x_b + channel * x_c)[:, :, None] + s * x_s
    x = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if WEIGHTED:
        w = tl.load(w_ptr + channel * w_c, mask=there, other=0.0).to(tl.float32)
    if BIASED:
        b = tl.load(b_ptr + channel * b_c, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x, axis=2), axis=1) / n
    x = tl.where(inside, x - mean[:, None, None], 0.0)
    rstd = reciprocal_root(tl.sum(tl.sum(x * x, axis=2), axis=1) / n, eps)
    if SAVED:
        tl.store(mean_ptr + row, mean, mask=row < M)
        tl.store(rstd_ptr + row, rstd, mask=row < M)
    if WEIGHTED:
        y = x * (rstd[:, None] * w)[:, :, None]
    else:
        y = x * rstd[:, None, None]
    if BIASED:
        y += b[:, :, None]
    write(y_ptr + (batch * y_b + channel * y_c)[:, :, None] + s * y_s, y, inside)


@triton.jit
def held_gradients(
    x_ptr, dy_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, B, G, CG, S, n, x_b, x_c, x_s, dy_b, dy_c, dy_s,
    dx_b, dx_c, dx_s, w_c, ROWS: tl.constexpr, WALK: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr,
    WEIGHTED: tl.constexpr, SUMMED: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (w dy - mean(w dy) - xhat * mean(w dy xhat)), means over a group. Program (block, g) takes group g of WALK
    times ROWS batch entries; with SUMMED it leaves its sums of dy xhat and of dy in row ``block`` of dw and db, each fp32
    [blocks, C]."""
    CG, S = known_sizes(CG, S, UNIT, DENSE)
    x_b, x_c, x_s = known_strides(x_b, x_c, x_s, UNIT, DENSE)
    dy_b, dy_c, dy_s = known_strides(dy_b, dy_c, dy_s, UNIT, DENSE)
    dx_b, dx_c, dx_s = known_strides(dx_b, dx_c, dx_s, UNIT, DENSE)
    g = tl.program_id(0) % G
    block = (tl.program_id(0) // G).to(tl.int64)
    c = tl.arange(0, CHANNELS)
    s = tl.arange(0, SPACE)[None, None, :]
    channel = g.to(tl.int64) * CG + c
    if WEIGHTED:
        w = tl.load(w_ptr + channel * w_c, mask=c < CG, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([CHANNELS], tl.float32)
    db = tl.zeros([CHANNELS], tl.float32)
    for i in range(0, WALK):
        batch = (block * WALK + i) * ROWS + tl.arange(0, ROWS)
        inside = ((batch < B)[:, None] & (c < CG)[None, :])[:, :, None] & (s < S)
        x_at = x_ptr + (batch[:, None] * x_b + channel[None, :] * x_c)[:, :, None] + s * x_s
        dy_at = dy_ptr + (batch[:, None] * dy_b + channel[None, :] * dy_c)[:, :, None] + s * dy_s
        x = tl.load(x_at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        dy = tl.load(dy_at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        mean = tl.load(mean_ptr + batch * G + g, mask=batch < B, other=0.0)
        rstd = tl.load(rstd_ptr + batch * G + g, mask=batch < B, other=0.0)
        xhat = (x - mean[:, None, None]) * rstd[:, None, None]  # outside of the tensor anything: dy is 0 there
        along = tl.sum(dy * xhat, axis=2)  # [ROWS, CHANNELS]
        level = tl.sum(dy, axis=2)
        if SUMMED:
            dw += tl.sum(along, axis=0)
            db += tl.sum(level, axis=0)
        if WEIGHTED:
            along *= w
            level *= w
            dy *= (rstd[:, None] * w)[:, :, None]
        else:
            dy *= rstd[:, None, None]
        along = rstd * (tl.sum(along, axis=1) / n)
        level = rstd * (tl.sum(level, axis=1) / n)
        dx = dy - (xhat * along[:, None, None] + level[:, None, None])
        write(dx_ptr + (batch[:, None] * dx_b + channel[None, :] * dx_c)[:, :, None] + s * dx_s, dx, inside)
    if SUMMED:
        own = block * (G * CG) + channel
        tl.store(dw_ptr + own, dw, mask=c < CG)
        tl.store(db_ptr + own, db, mask=c < CG)
