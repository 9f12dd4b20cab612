"""Triton kernels of quantisation and of its inverse.

A tensor [M, N] is taken by *lines*, stretches of a row that are quantised together: whole rows, or groups of LENGTH columns, of
which a row has ``lines``. Line i of outer index o begins at ``o * x_outer + i * x_line``; the same goes for its values (v, in
bytes) and for its random groups of eight (r).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.dropout.philox import random_bits
from weft.operators.quantization.rounding import decode, encode


@triton.jit
def scale_and_inverse(largest, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """formats.scale_of, and 1 / scale. A reduction to the maximum ignores NaN, unless there is nothing else."""
    largest = tl.where(largest == largest, tl.minimum(largest, 3.4028234663852886e38), 0.0)
    scale = tl.div_rn(largest, LARGEST)
    if POWER:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.maximum(scale, 1.1754943508222875e-38)  # 2**-126
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def magnitude(x):
    """|x|, and 0 of NaN: an elementwise maximum ignores NaN on GPUs, not in Triton's interpreter."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def read(ptr, inside):
    return tl.load(ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)  # hint: softmax/README.md


@triton.jit
def random_of(group, seed_ptr, seed, offset, BLOCK: tl.constexpr, PER: tl.constexpr, RANDOM: tl.constexpr):
    """Random bits [ROWS, BLOCK] for columns that begin with the groups of eight ``group`` [ROWS]. RANDOM says where the seed
    is: ``number`` or ``memory``; or ``none``, without bits."""
    if RANDOM == "none":
        return 0
    else:
        if RANDOM == "memory":
            seed = tl.load(seed_ptr)
        part = group[:, None] * (8 // PER) + tl.arange(0, BLOCK // PER)[None, :]
        bits = random_bits(part.to(tl.uint64), seed.to(tl.uint64), offset.to(tl.uint64), PER)
        return tl.reshape(bits, [group.shape[0], BLOCK])


@triton.jit
def write_values(ptr, code, known, room):
    """Codes [ROWS, BYTES] from ptr [ROWS] on, as long as there is room for bytes."""
    byte = tl.arange(0, code.shape[1])[None, :]
    tl.store(ptr[:, None] + byte, code, mask=known[:, None] & (byte < room))


@triton.jit
def bytes_of(room, whole, PER_BYTE: tl.constexpr, RAGGED: tl.constexpr):
    """How many bytes the rest of a line takes: ``whole``, a number that is known to be a multiple of 16 where it is, or where
    lines end early what their elements take."""
    return (room + (PER_BYTE - 1)) // PER_BYTE if RAGGED else whole


@triton.jit(do_not_specialize=["seed", "offset"])
def quantize_lines(
    x_ptr, v_ptr, s_ptr, seed_ptr, seed: tl.uint64, offset: tl.uint64,
    lines, LENGTH, N, x_outer, x_line, x_col, v_outer, v_line, r_outer, r_line,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, LARGEST: tl.constexpr, PER_BYTE: tl.constexpr,
    POWER: tl.constexpr, NESTED: tl.constexpr, RAGGED: tl.constexpr, RANDOM: tl.constexpr, PER: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """A program holds ROWS whole lines, [ROWS, BLOCK] with BLOCK >= LENGTH, and reads them once. NESTED: there are several
    outer indices (a division is 25 instructions). RAGGED: the last line of a row of N may be shorter."""
    o = (tl.program_id(0) // tl.cdiv(lines, ROWS)).to(tl.int64) if NESTED else 0
    tile = tl.program_id(0) % tl.cdiv(lines, ROWS) if NESTED else tl.program_id(0)
    i = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    room = LENGTH
    if RAGGED:
        room = tl.minimum(LENGTH, N - i[:, None] * LENGTH)
    inside = (i[:, None] < lines) & (col < room)
    x = read(x_ptr + o * x_outer + i[:, None] * x_line + col.to(tl.int64) * x_col, inside)
    scale, inverse = scale_and_inverse(tl.max(tl.abs(x), axis=1), LARGEST, POWER)
    tl.store(s_ptr + o * lines + i, scale, mask=i < lines)
    bits = random_of(o * r_outer + i * r_line, seed_ptr, seed, offset, BLOCK, PER, RANDOM)
    code = encode(x * inverse[:, None], bits, FORMAT, RANDOM != "none", HARDWARE)
    write_values(v_ptr + o * v_outer + i * v_line, code, i < lines, bytes_of(room, v_line, PER_BYTE, RAGGED))


@triton.jit(do_not_specialize=["seed", "offset"])
def quantize_long_lines(
    x_ptr, v_ptr, s_ptr, seed_ptr, seed: tl.uint64, offset: tl.uint64,
    lines, LENGTH, N, x_outer, x_line, x_col, v_outer, v_line, r_outer, r_line,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr, LARGEST: tl.constexpr, PER_BYTE: tl.constexpr,
    POWER: tl.constexpr, RAGGED: tl.constexpr, RANDOM: tl.constexpr, PER: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """The same for a line that does not fit: one program walks it twice, the second time from L2 where it fits."""
    o = (tl.program_id(0) // lines).to(tl.int64)
    i = (tl.program_id(0) % lines).to(tl.int64) + tl.arange(0, 1)
    room = tl.minimum(LENGTH, N - (tl.program_id(0) % lines) * LENGTH) if RAGGED else LENGTH
    x_ptr += o * x_outer + i[:, None] * x_line
    v_ptr += o * v_outer + i * v_line
    col = tl.arange(0, BLOCK)[None, :]
    most = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, room, BLOCK):
        c = (start + col).to(tl.int64)
        most = tl.maximum(most, magnitude(read(x_ptr + c * x_col, c < room)))
    scale, inverse = scale_and_inverse(tl.max(most, axis=1), LARGEST, POWER)
    tl.store(s_ptr + o * lines + i, scale)
    for start in range(0, room, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + c * x_col, mask=c < room, other=0.0, eviction_policy="evict_first").to(tl.float32)
        bits = random_of(o * r_outer + i * r_line + start // 8, seed_ptr, seed, offset, BLOCK, PER, RANDOM)
        code = encode(x * inverse[:, None], bits, FORMAT, RANDOM != "none", HARDWARE)
        left = bytes_of(room, v_line, PER_BYTE, RAGGED) - start // PER_BYTE
        write_values(v_ptr + start // PER_BYTE, code, i < lines, left)


@triton.jit(do_not_specialize=["seed", "offset"])
def quantize_blocks(
    x_ptr, v_ptr, s_ptr, seed_ptr, seed: tl.uint64, offset: tl.uint64,
    M, N, x_matrix, x_row, x_col, v_row, r_row,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr, LARGEST: tl.constexpr, PER_BYTE: tl.constexpr, POWER: tl.constexpr,
    RANDOM: tl.constexpr, PER: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A program holds one block [BLOCK, BLOCK] of a matrix [M, N] of a batch and reads it once."""
    across, down = tl.cdiv(N, BLOCK), tl.cdiv(M, BLOCK)
    matrix = (tl.program_id(0) // (across * down)).to(tl.int64)
    row = (tl.program_id(0) // across % down).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = (tl.program_id(0) % across).to(tl.int64) * BLOCK
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < M) & (first + col < N)
    x = read(x_ptr + matrix * x_matrix + row[:, None] * x_row + (first + col) * x_col, inside)
    scale, inverse = scale_and_inverse(tl.max(tl.max(tl.abs(x), axis=1), axis=0), LARGEST, POWER)
    tl.store(s_ptr + tl.program_id(0), scale)
    of_all = matrix * M + row
    bits = random_of(of_all * r_row + first // 8, seed_ptr, seed, offset, BLOCK, PER, RANDOM)
    code = encode(x * inverse, bits, FORMAT, RANDOM != "none", HARDWARE)
    write_values(v_ptr + of_all * v_row + first // PER_BYTE, code, row < M, v_row - first // PER_BYTE)


# ---- scales that span rows: absmax of strips, the scale from these, then quantisation by a scale --------------------


@triton.jit
def absmax_strips(
    x_ptr, partial_ptr, M, N, total, x_row, x_col,
    STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PER_COLUMN: tl.constexpr, WRAPPED: tl.constexpr,
):  # fmt: skip
    """Of STRIP rows of BLOCK columns: partial [strips, N], or one number a program. WRAPPED: the rows are one stretch of memory
    that ends after ``total`` elements."""
    tiles = tl.cdiv(N, BLOCK)
    strip = (tl.program_id(0) // tiles).to(tl.int64) * STRIP
    col = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    most = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, STRIP, ROWS):
        row = strip + start + tl.arange(0, ROWS)
        inside = (row[:, None] < M) & (col[None, :] < N)
        if WRAPPED:
            inside &= row[:, None] * N + col[None, :] < total
        most = tl.maximum(most, magnitude(read(x_ptr + row[:, None] * x_row + col[None, :] * x_col, inside)))
    if PER_COLUMN:
        tl.store(partial_ptr + (tl.program_id(0) // tiles).to(tl.int64) * N + col, tl.max(most, axis=0), mask=col < N)
    else:
        tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(most, axis=1), axis=0))


@triton.jit
def scales_of_strips(
    partial_ptr, s_ptr, P, C, ROWS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, POWER: tl.constexpr
):
    """s [C] from partial [P, C]."""
    col = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    most = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row[:, None] < P) & (col[None, :] < C)
        most = tl.maximum(most, tl.load(partial_ptr + row[:, None] * C + col[None, :], mask=inside, other=0.0))
    scale, _ = scale_and_inverse(tl.max(most, axis=0), LARGEST, POWER)
    tl.store(s_ptr + col, scale, mask=col < C)


@triton.jit
def place(pid, lines, LENGTH, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr):
    """This program's outer index, its ROWS lines, its first column, and how many elements there are from there on."""
    across, down = tl.cdiv(LENGTH, BLOCK), tl.cdiv(lines, ROWS)
    first = (pid % across).to(tl.int64) * BLOCK
    o = (pid // across // down).to(tl.int64)
    i = (pid // across % down).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    room = LENGTH - first
    if RAGGED:
        room = tl.minimum(LENGTH, N - i[:, None] * LENGTH) - first
    return o, i, first, room


@triton.jit
def read_scale(s_ptr, o, i, col, s_outer, s_line, known, in_columns, MATRIX, BY: tl.constexpr):
    """The scales of lines [ROWS, 1], or BY ``column`` [1, BLOCK]. BY ``block``: o is a row of a batch of matrices of MATRIX
    rows, and 128 rows share their scales."""
    if BY == "column":
        return tl.load(s_ptr + col, mask=in_columns, other=1.0)
    else:
        if BY == "block":
            o = o // MATRIX * tl.cdiv(MATRIX, 128) + o % MATRIX // 128
        return tl.load(s_ptr + o * s_outer + i * s_line, mask=known, other=1.0)[:, None]


@triton.jit(do_not_specialize=["seed", "offset"])
def quantize_by_scale(
    x_ptr, v_ptr, s_ptr, seed_ptr, seed: tl.uint64, offset: tl.uint64,
    lines, LENGTH, N, MATRIX, x_outer, x_line, x_col, v_outer, v_line, r_outer, r_line, s_outer, s_line,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PER_BYTE: tl.constexpr, BY: tl.constexpr,
    BACKWARDS: tl.constexpr, RAGGED: tl.constexpr, RANDOM: tl.constexpr, PER: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Scales are there. BACKWARDS: the last tile first, since the pass before this one left it in L2."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0) if BACKWARDS else tl.program_id(0)
    o, i, first, room = place(pid, lines, LENGTH, N, ROWS, BLOCK, RAGGED)
    col = tl.arange(0, BLOCK)[None, :]
    x = read(x_ptr + o * x_outer + i[:, None] * x_line + (first + col) * x_col, (i[:, None] < lines) & (col < room))
    scale = read_scale(s_ptr, o, i, first + col, s_outer, s_line, i < lines, col < room, MATRIX, BY)
    bits = random_of(o * r_outer + i * r_line + first // 8, seed_ptr, seed, offset, BLOCK, PER, RANDOM)
    code = encode(x * tl.div_rn(1.0, scale), bits, FORMAT, RANDOM != "none", HARDWARE)
    left = bytes_of(room, v_line - first // PER_BYTE, PER_BYTE, RAGGED)
    write_values(v_ptr + o * v_outer + i * v_line + first // PER_BYTE, code, i < lines, left)


@triton.jit
def dequantize_lines(
    v_ptr, s_ptr, out_ptr, lines, LENGTH, N, MATRIX, v_outer, v_line, v_col, out_outer, out_line, s_outer, s_line,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PER_BYTE: tl.constexpr, BY: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """out = value * scale in fp32, rounded once."""
    o, i, first, room = place(tl.program_id(0), lines, LENGTH, N, ROWS, BLOCK, RAGGED)
    col = tl.arange(0, BLOCK)[None, :]
    byte = tl.arange(0, BLOCK // PER_BYTE)[None, :]
    known = i[:, None] < lines
    at = v_ptr + o * v_outer + i[:, None] * v_line + (first // PER_BYTE + byte) * v_col
    code = tl.load(at, mask=known & (byte * PER_BYTE < room), other=0, eviction_policy="evict_last")
    scale = read_scale(s_ptr, o, i, first + col, s_outer, s_line, i < lines, col < room, MATRIX, BY)
    out = (decode(code, FORMAT) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + o * out_outer + i[:, None] * out_line + first + col, out, mask=known & (col < room))
