"""Triton kernels over rows [M, N]: softmax, log-softmax, and softmax(scale * x + mask) with a causal, boolean or additive mask.

A row of up to ``ONE_PASS`` columns is held in registers, so each tensor is read once. A longer row is read twice, the second
time from L2 where it fits; ``cluster.cu`` keeps such rows on chip. Reads are marked ``evict_last``: docs/notes/softmax.md says
what that brings.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from weft.operators import row_programs
from weft.operators.configs import Config, Configurations, bucket
from weft.operators.cuda import pointer_aligned
from weft.operators.launch import Plan
from weft.operators.layout import views
from weft.operators.row_programs import candidates, fitted, heuristic, in_pieces, lie_apart, side_by_side, tail_of


@triton.jit
def exponential(t, ACCURATE: tl.constexpr):
    """exp(t) for t <= 0. ``tl.exp`` multiplies by log2(e) and takes ``ex2``: the product's rounding alone costs |t|/2 ulp.
    ACCURATE splits the product, which is never rounded as a whole, into integer and fraction, for fp32 results as exact as
    PyTorch's. (Of a rounded product and what it lost a compiler that fuses the next sum counts the loss twice.)"""
    if ACCURATE:
        whole = tl.floor(tl.fma(t, 1.4426950216293335, 0.5))
        rest = tl.fma(t, 1.9259629911266174e-8, tl.fma(t, 1.4426950216293335, -whole))  # log2(e) as a sum of two floats
        scaled = tl.exp2(tl.where(whole < -200.0, -200.0, whole)) * tl.exp2(rest)
        return tl.where(t < -150.0, 0.0, scaled)
    else:
        return tl.exp(t)


@triton.jit
def online_step(x, maximum, total, ACCURATE: tl.constexpr):
    """Adds x to each lane's running maximum and sum of exponentials (online softmax, Milakov & Gimelshein 2018)."""
    higher = tl.maximum(maximum, x, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that has seen only -inf
    return higher, total * exponential(maximum - base, ACCURATE) + exponential(x - base, ACCURATE)


# A whole row is held in [ROWS, BLOCK] with BLOCK >= N, or where that is much padding in [ROWS, BLOCK] and a TAIL of fewer
# columns behind it, [ROWS, TAIL]: both are powers of two, and of their sum less is padding (``row_programs.tail_of``).


@triton.jit
def tile(ptr, row, col, row_stride, col_stride):
    return ptr + (row[:, None] * row_stride + col[None, :] * col_stride)


@triton.jit
def read(at, inside, other):
    return tl.load(at, mask=inside, other=other, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def write(at, value, inside):
    tl.store(at, value.to(at.dtype.element_ty), mask=inside)


# ---- softmax and log-softmax -------------------------------------------------------------------------------------------


@triton.jit
def softmax_rows(
    x_ptr, y_ptr, M, N, x_row, x_col, y_row, y_col,
    LOG: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """y[m, :] = exp(x[m, :] - max) / sum, or with LOG x[m, :] - max - log(sum). One program holds ROWS whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: row * stride may pass 2**31
    col, rest = tl.arange(0, BLOCK), BLOCK + tl.arange(0, max(TAIL, 1))
    inside = (row[:, None] < M) & (col[None, :] < N)
    behind = (row[:, None] < M) & (rest[None, :] < N)
    x = read(tile(x_ptr, row, col, x_row, x_col), inside, -float("inf"))
    most = tl.max(x, axis=1)
    if TAIL > 0:
        tail = read(tile(x_ptr, row, rest, x_row, x_col), behind, -float("inf"))
        most = tl.maximum(most, tl.max(tail, axis=1))
    x -= most[:, None]  # a row of only -inf gives NaN, as in PyTorch
    e = exponential(x, ACCURATE)
    total = tl.sum(e, axis=1)
    if TAIL > 0:
        tail -= most[:, None]
        e_tail = exponential(tail, ACCURATE)
        total += tl.sum(e_tail, axis=1)
    if LOG:
        level = tl.log(total)[:, None]
        write(tile(y_ptr, row, col, y_row, y_col), x - level, inside)
        if TAIL > 0:
            write(tile(y_ptr, row, rest, y_row, y_col), tail - level, behind)
    else:
        factor = tl.div_rn(1.0, total)[:, None]  # one exact division a row
        write(tile(y_ptr, row, col, y_row, y_col), e * factor, inside)
        if TAIL > 0:
            write(tile(y_ptr, row, rest, y_row, y_col), e_tail * factor, behind)


@triton.jit
def softmax_long_rows(
    x_ptr, y_ptr, M, N, x_row, x_col, y_row, y_col,
    LOG: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for rows that do not fit: one program reads them once for their maximum and sum, and once to write."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_ptr += row[:, None] * x_row
    y_ptr += row[:, None] * y_row
    maximum = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        inside = (row[:, None] < M) & (c < N)
        x = tl.load(x_ptr + c * x_col, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        maximum, total = online_step(x.to(tl.float32), maximum, total, ACCURATE)
    row_maximum = tl.max(maximum, axis=1)[:, None]
    row_total = tl.sum(total * exponential(maximum - row_maximum, ACCURATE), axis=1)[:, None]  # NaN when all are -inf
    if LOG:
        factor = tl.log(row_total)
    else:
        factor = tl.div_rn(1.0, row_total)
    for start in range(0, N, BLOCK):
        c = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        inside = (row[:, None] < M) & (c < N)
        x = tl.load(x_ptr + c * x_col, mask=inside, eviction_policy="evict_first").to(tl.float32)
        if LOG:
            y = (x - row_maximum) - factor
        else:
            y = exponential(x - row_maximum, ACCURATE) * factor
        tl.store(y_ptr + c * y_col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def piece_of(ptr, c, begin, end, last, other, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """Elements c (from a multiple of VECTOR on) of memory that begins on 16 bytes, in fp32; ``other`` where they are not of
    begin … end. WHOLE: all of them are. Of a vector across a row's ends the rest is read too, but of the last row."""
    if WHOLE:
        return tl.load(ptr + c, eviction_policy="evict_last").to(tl.float32)
    else:
        inside = (c >= begin) & (c < end)
        if last:
            x = tl.load(ptr + c, mask=inside, other=0.0, eviction_policy="evict_last")
        else:
            x = tl.load(ptr + c, mask=c // VECTOR * VECTOR < end, other=0.0, eviction_policy="evict_last")
        return tl.where(inside, x.to(tl.float32), other)


@triton.jit
def write_piece(ptr, c, begin, end, value, VECTOR: tl.constexpr):
    """To the elements c of begin … end: whole vectors, and those across a row's ends by element."""
    first = c // VECTOR * VECTOR
    whole = (first >= begin) & (first + VECTOR <= end)
    tl.store(ptr + c, value, mask=whole)
    tl.store(ptr + c, value, mask=(c >= begin) & (c < end) & (whole == 0))


@triton.jit
def vectors_of(ptr, c, begin, end, last, VECTOR: tl.constexpr, WHOLE: tl.constexpr):
    """:func:`piece_of` as [vectors, VECTOR], -inf behind a row's ends."""
    x = piece_of(ptr, c, begin, end, last, -float("inf"), VECTOR, WHOLE)
    return tl.reshape(x, [c.shape[0] // VECTOR, VECTOR])


@triton.jit
def behind_16_bytes(ptr, VECTOR: tl.constexpr):
    """The 16 bytes in which a row begins, and its elements there that are not the row's."""
    address = ptr.to(tl.int64)
    return tl.multiple_of((address - address % 16).to(ptr.dtype), 16), (address % 16 // (16 // VECTOR)).to(tl.int32)


@triton.jit
def vectors_step(x, maximum, total, ACCURATE: tl.constexpr):
    """:func:`online_step` of vectors, of which each has one maximum: an exponential an element and one a vector."""
    higher = tl.maximum(maximum, tl.max(x, axis=1), propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    each = tl.sum(exponential(x - base[:, None], ACCURATE), axis=1)
    return higher, total * exponential(maximum - base, ACCURATE) + each


@triton.jit
def softmax_vectors(
    x_ptr, y_ptr, M, N, x_row, x_col, y_row, y_col,
    LOG: tl.constexpr, ACCURATE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The same for a row that begins anywhere, of adjacent elements, in x and y equally far behind 16 bytes: it is read from
    there on, VECTOR elements at a time."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr, begin = behind_16_bytes(x_ptr + row * x_row, VECTOR)
    y_ptr, _ = behind_16_bytes(y_ptr + row * y_row, VECTOR)
    end, last = begin + N, row == M - 1
    maximum = tl.full([BLOCK // VECTOR], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK // VECTOR], tl.float32)
    for start in range(0, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        if (start > 0) & (start + BLOCK <= end):
            x = vectors_of(x_ptr, c, begin, end, last, VECTOR, True)
        else:
            x = vectors_of(x_ptr, c, begin, end, last, VECTOR, False)
        maximum, total = vectors_step(x, maximum, total, ACCURATE)
    row_maximum = tl.max(maximum, axis=0)
    row_total = tl.sum(total * exponential(maximum - row_maximum, ACCURATE), axis=0)  # NaN when all are -inf
    if LOG:
        factor = tl.log(row_total)
    else:
        factor = tl.div_rn(1.0, row_total)
    for start in range(0, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        if (start > 0) & (start + BLOCK <= end):
            x = tl.reshape(vectors_of(x_ptr, c, begin, end, last, VECTOR, True), [BLOCK])
            y = (x - row_maximum) - factor if LOG else exponential(x - row_maximum, ACCURATE) * factor
            tl.store(y_ptr + c, y.to(y_ptr.dtype.element_ty))
        else:
            x = tl.reshape(vectors_of(x_ptr, c, begin, end, last, VECTOR, False), [BLOCK])
            y = (x - row_maximum) - factor if LOG else exponential(x - row_maximum, ACCURATE) * factor
            tl.store(y_ptr + c, y.to(y_ptr.dtype.element_ty), mask=(c >= begin) & (c < end))


# ---- softmax with a mask -----------------------------------------------------------------------------------------------
#
# Of a causal row only the columns that it sees are read (rounded up to 16, so that accesses stay 16 bytes wide); the zeros
# after them are written. Masks are read in place, however they broadcast: the address of a row's mask comes from its index
# and up to three strides.


@triton.jit
def visible(row, N, S):
    """How many columns a row of a causal mask sees: those up to its own position, the last row's being the last column."""
    return tl.minimum(tl.maximum(row % S + 1 + N - S, 0), N)


@triton.jit
def seen_by(ROWS: tl.constexpr, M, N, S):
    """How many columns each row of a program sees: one division of 64 bits for all of them."""
    first = (tl.program_id(0).to(tl.int64) * ROWS % S).to(tl.int32)
    sees = visible(first + tl.arange(0, ROWS), N, S)
    return tl.where(tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS) < M, sees, 0)[:, None]


@triton.jit
def round_up_to_16(n):
    return (n + 15) // 16 * 16


@triton.jit
def mask_row(row, m1, m2, s0, s1, s2):
    """Offset of a row's mask: the row's index in three digits, of bases m1 and m2, each times its stride."""
    return row // (m1 * m2) * s0 + row // m2 % m1 * s1 + row % m2 * s2


@triton.jit
def scores(x, mask_ptr, col_stride, col, inside, sees, scale, MASK: tl.constexpr):
    """scale * x + mask; -inf beyond the columns that a row sees."""
    x = x.to(tl.float32) * scale
    if MASK == 1:  # boolean: false adds -inf
        x += tl.where(tl.load(mask_ptr + col * col_stride, mask=inside, other=0) != 0, 0.0, -float("inf"))
    if MASK == 2:
        x += tl.load(mask_ptr + col * col_stride, mask=inside, other=0.0).to(tl.float32)
    return tl.where(col < sees, x, -float("inf"))


@triton.jit
def masked_softmax_rows(
    x_ptr, mask_ptr, y_ptr, M, N, S, x_row, x_col, y_row, y_col, m1, m2, s0, s1, s2, mask_col, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """One program holds ROWS whole rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col, rest = tl.arange(0, BLOCK), BLOCK + tl.arange(0, max(TAIL, 1))
    columns = tl.where(row < M, N, 0)[:, None]
    seen = col[None, :] < columns
    sees = columns
    if CAUSAL:
        sees = seen_by(ROWS, M, N, S)
        seen = col[None, :] < tl.minimum(round_up_to_16(sees), N)
    x = tl.load(tile(x_ptr, row, col, x_row, x_col), mask=seen, other=0.0, eviction_policy="evict_last")
    if MASK:
        mask_ptr += mask_row(row, m1, m2, s0, s1, s2)[:, None]
    x = scores(x, mask_ptr, mask_col, col[None, :], seen, sees, scale, MASK)
    most = tl.max(x, axis=1)
    if TAIL > 0:
        seen = rest[None, :] < columns
        if CAUSAL:
            seen = rest[None, :] < tl.minimum(round_up_to_16(sees), N)
        tail = read(tile(x_ptr, row, rest, x_row, x_col), seen, 0.0)
        tail = scores(tail, mask_ptr, mask_col, rest[None, :], seen, sees, scale, MASK)
        most = tl.maximum(most, tl.max(tail, axis=1))
    e = exponential(x - most[:, None], ACCURATE)  # a row without any column is NaN, as in PyTorch
    total = tl.sum(e, axis=1)
    if TAIL > 0:
        e_tail = exponential(tail - most[:, None], ACCURATE)
        total += tl.sum(e_tail, axis=1)
    factor = tl.div_rn(1.0, total)[:, None]
    write(tile(y_ptr, row, col, y_row, y_col), e * factor, col[None, :] < columns)
    if TAIL > 0:
        write(tile(y_ptr, row, rest, y_row, y_col), e_tail * factor, rest[None, :] < columns)


@triton.jit
def masked_softmax_long_rows(
    x_ptr, mask_ptr, y_ptr, M, N, S, x_row, x_col, y_row, y_col, m1, m2, s0, s1, s2, mask_col, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, ACCURATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for a row that does not fit: read once for its maximum and sum, and once to write."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    sees, read = N, N
    if CAUSAL:
        sees = visible(row, N, S)
        read = tl.minimum(round_up_to_16(sees), N)
    x_ptr += row * x_row
    if MASK:
        mask_ptr += mask_row(row, m1, m2, s0, s1, s2)
    maximum = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, read, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + c * x_col, mask=c < read, other=0.0, eviction_policy="evict_last")
        x = scores(x, mask_ptr, mask_col, c, c < read, sees, scale, MASK)
        maximum, total = online_step(x, maximum, total, ACCURATE)
    row_maximum = tl.max(maximum, axis=0)
    # NaN when all are -inf
    factor = tl.div_rn(1.0, tl.sum(total * exponential(maximum - row_maximum, ACCURATE), axis=0))
    for start in range(0, N, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + c * x_col, mask=c < read, other=0.0, eviction_policy="evict_first")
        x = scores(x, mask_ptr, mask_col, c, c < read, sees, scale, MASK)
        y = exponential(x - row_maximum, ACCURATE) * factor
        tl.store(y_ptr + row * y_row + c * y_col, y.to(y_ptr.dtype.element_ty), mask=c < N)


# ---- gradients of all of them ------------------------------------------------------------------------------------------


@triton.jit
def factor_of(y, scale, LOG: tl.constexpr, ACCURATE: tl.constexpr):
    """What depends on y alone."""
    if LOG:
        return exponential(y, ACCURATE)
    else:
        return scale * y


@triton.jit
def gradient(dy, factor, total, LOG: tl.constexpr):
    """From the factor and the sum over the row: of dy with LOG, else of y * dy."""
    if LOG:
        return dy - factor * total
    else:
        return factor * (dy - total)


@triton.jit
def softmax_backward_rows(
    y_ptr, dy_ptr, dx_ptr, M, N, S, y_row, y_col, dy_row, dy_col, dx_row, dx_col, scale, LOG: tl.constexpr,
    CAUSAL: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dx = scale * y * (dy - sum(y * dy)), or with LOG dy - exp(y) * sum(dy); whole rows in registers. What a causal mask hides
    is neither read nor given a gradient; another mask is not needed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col, rest = tl.arange(0, BLOCK), BLOCK + tl.arange(0, max(TAIL, 1))
    columns = tl.where(row < M, N, 0)[:, None]
    inside = col[None, :] < columns
    seen = inside
    if CAUSAL:
        sees = seen_by(ROWS, M, N, S)
        seen = col[None, :] < tl.minimum(round_up_to_16(sees), N)
    y_at, dy_at = tile(y_ptr, row, col, y_row, y_col), tile(dy_ptr, row, col, dy_row, dy_col)
    y, dy = read(y_at, seen, 0.0), read(dy_at, seen, 0.0)
    if CAUSAL:
        y = tl.where(col[None, :] < sees, y, 0.0)
        dy = tl.where(col[None, :] < sees, dy, 0.0)
    factor = factor_of(y, scale, LOG, ACCURATE)
    total = tl.sum(dy if LOG else y * dy, axis=1)
    if TAIL > 0:
        seen = rest[None, :] < columns
        if CAUSAL:
            seen = rest[None, :] < tl.minimum(round_up_to_16(sees), N)
        y_at, dy_at = tile(y_ptr, row, rest, y_row, y_col), tile(dy_ptr, row, rest, dy_row, dy_col)
        y_tail, dy_tail = read(y_at, seen, 0.0), read(dy_at, seen, 0.0)
        if CAUSAL:
            y_tail = tl.where(rest[None, :] < sees, y_tail, 0.0)
            dy_tail = tl.where(rest[None, :] < sees, dy_tail, 0.0)
        total += tl.sum(dy_tail if LOG else y_tail * dy_tail, axis=1)
    dx = gradient(dy, factor, total[:, None], LOG)
    if CAUSAL:
        dx = tl.where(col[None, :] < sees, dx, 0.0)
    write(tile(dx_ptr, row, col, dx_row, dx_col), dx, inside)
    if TAIL > 0:
        dx = gradient(dy_tail, factor_of(y_tail, scale, LOG, ACCURATE), total[:, None], LOG)
        if CAUSAL:
            dx = tl.where(rest[None, :] < sees, dx, 0.0)
        write(tile(dx_ptr, row, rest, dx_row, dx_col), dx, rest[None, :] < columns)


@triton.jit
def softmax_backward_long_rows(
    y_ptr, dy_ptr, dx_ptr, M, N, S, y_row, y_col, dy_row, dy_col, dx_row, dx_col, scale,
    LOG: tl.constexpr, CAUSAL: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same, reading dy twice, and y twice or (LOG) once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.where(row < M, N, 0)[:, None]
    sees, most = columns, N
    if CAUSAL:
        sees = seen_by(ROWS, M, N, S)
        most = tl.max(sees)
    y_ptr += row[:, None] * y_row
    dy_ptr += row[:, None] * dy_row
    dx_ptr += row[:, None] * dx_row
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, most, BLOCK):
        c = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        each = tl.load(dy_ptr + c * dy_col, mask=c < sees, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if not LOG:
            each *= tl.load(y_ptr + c * y_col, mask=c < sees, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total += each
    s = tl.sum(total, axis=1)[:, None]
    last: tl.constexpr = "evict_last" if LOG else "evict_first"  # of y, which LOG reads here for the first time
    for start in range(0, N, BLOCK):
        c = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        y = tl.load(y_ptr + c * y_col, mask=c < sees, other=0.0, eviction_policy=last).to(tl.float32)
        dy = tl.load(dy_ptr + c * dy_col, mask=c < sees, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dx = gradient(dy, factor_of(y, scale, LOG, ACCURATE), s, LOG)
        if CAUSAL:
            dx = tl.where(c < sees, dx, 0.0)
        tl.store(dx_ptr + c * dx_col, dx.to(dx_ptr.dtype.element_ty), mask=c < columns)


@triton.jit
def softmax_backward_vectors(
    y_ptr, dy_ptr, dx_ptr, M, N, S, y_row, y_col, dy_row, dy_col, dx_row, dx_col, scale,
    LOG: tl.constexpr, CAUSAL: tl.constexpr, ACCURATE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The same, without a causal mask, of rows as :func:`softmax_vectors` takes them, all three equally far behind 16 bytes.
    They are read a second time from the end on, of which most is still in L2."""
    row = tl.program_id(0).to(tl.int64)
    y_ptr, begin = behind_16_bytes(y_ptr + row * y_row, VECTOR)
    dy_ptr, _ = behind_16_bytes(dy_ptr + row * dy_row, VECTOR)
    dx_ptr, _ = behind_16_bytes(dx_ptr + row * dx_row, VECTOR)
    end, last = begin + N, row == M - 1
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        if (start > 0) & (start + BLOCK <= end):
            each = piece_of(dy_ptr, c, begin, end, last, 0.0, VECTOR, True)
            if not LOG:
                each *= piece_of(y_ptr, c, begin, end, last, 0.0, VECTOR, True)
        else:
            each = piece_of(dy_ptr, c, begin, end, last, 0.0, VECTOR, False)
            if not LOG:
                each *= piece_of(y_ptr, c, begin, end, last, 0.0, VECTOR, False)
        total += each
    s = tl.sum(total, axis=0)
    steps = (end + BLOCK - 1) // BLOCK
    for i in range(0, steps):
        start = (steps - 1 - i) * BLOCK
        c = start + tl.arange(0, BLOCK)
        if (start > 0) & (start + BLOCK <= end):
            dy = piece_of(dy_ptr, c, begin, end, last, 0.0, VECTOR, True)
            y = piece_of(y_ptr, c, begin, end, last, 0.0, VECTOR, True)
            dx = gradient(dy, factor_of(y, scale, LOG, ACCURATE), s, LOG).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + c, dx)
        else:
            dy = piece_of(dy_ptr, c, begin, end, last, 0.0, VECTOR, False)
            y = piece_of(y_ptr, c, begin, end, last, 0.0, VECTOR, False)
            dx = gradient(dy, factor_of(y, scale, LOG, ACCURATE), s, LOG).to(dx_ptr.dtype.element_ty)
            write_piece(dx_ptr, c, begin, end, dx, VECTOR)


# Of a ``RowCall`` (dispatch.py), which has m rows of n columns.


def in_two(n: int, name: str) -> Config:
    """For rows that two tiles hold (measured at 16 shapes, aligned ones too): 512 columns of the first a warp."""
    tail, block = tail_of(n), bucket(n) // 2
    if not tail or n > (5120 if name in ("forward", "log_softmax") else 1280):
        return {}
    return {"ROWS": max(512 // block, 1), "num_warps": max(block // 512, 1), "TAIL": tail}


def begin_alike(*tensors: Tensor) -> bool:
    """Whether rows of adjacent elements begin equally far behind 16 bytes; the last tensor is memory of its own."""
    (_, _, row, _), *_ = laid = views(*tensors)
    alike = all(column == 1 and (each - row) * tensors[0].element_size() % 16 == 0 for _, _, each, column in laid)
    return alike and all(map(pointer_aligned, tensors[:-1])) and len({t.dtype for t in tensors}) == 1


VECTORS = {"forward": softmax_vectors, "log_softmax": softmax_vectors} | dict.fromkeys(
    ("backward", "log_softmax_backward"), softmax_backward_vectors
)


def launch_rows(c: Any) -> Plan:
    config, (scalars, flags) = CONFIGURATIONS[c.name](c.x.device, c.x.dtype, bucket(c.n)), c.arguments
    pieces, beside = in_pieces(*c.tensors), lie_apart(c.strides) and "ROWS" in c.triton[1].arg_names
    if beside:
        config = side_by_side(c.x, c.m, c.n, 64 if len(c.tensors) == 2 else 128)
    elif pieces and c.n > 8192 and (by_vectors := VECTORS.get(c.name)) and begin_alike(*c.tensors) and not c.traced:
        block, warps = (8192, 16) if c.n > row_programs.ONE_PASS else (2048, 8)
        if by_vectors is softmax_backward_vectors and (block > 2048 or c.x.element_size() == 4):
            block, warps = 4096, 16
        tile = {"BLOCK": block, "VECTOR": 16 // c.x.element_size()}
        return Plan(by_vectors, (c.m,), (c.m, *scalars), {**flags, **tile}, warps)
    elif pieces and c.n > 8192 and c.name in ("forward", "log_softmax"):
        config = {"ROWS": 1, "BLOCK": 4096, "num_warps": 8}  # less padding, and more rows in flight
    else:
        config = in_two(c.n, c.name) or fitted(config, c.x, c.n, pieces)
    return row_programs.plan(c.triton, config, c.m, c.n, (c.m, *scalars), flags)


CONFIGURATIONS = {
    name: Configurations(__file__, name, heuristic, candidates)
    for name in ("forward", "backward", "log_softmax", "log_softmax_backward", "masked", "masked_backward")
}
