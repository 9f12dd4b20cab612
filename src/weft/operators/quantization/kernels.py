"""Triton kernels of quantisation and of its inverse.

A tensor [M, N] is taken by *lines*, stretches of a row that are quantised together: whole rows, or groups of LENGTH columns, of
which a row has ``lines``. Line i of outer index o begins at ``o * x_outer + i * x_line``; the same goes for its values (v, in
bytes) and for its random groups of eight (r).

Codes equal those of :mod:`formats` bit for bit. Rounding to an fp8 is integer arithmetic on an fp32's bits: adding half of what
is cut off (and one at ties whose kept part is odd) carries into the kept bits, and into the exponent where it must. Below the
format's smallest normal number its steps are equal, and one addition of fp32 rounds to them: of the power of two whose own
last place is such a step. From sm_89 on, one instruction rounds two elements; it gives the same codes. Stochastic rounding adds
16 random bits to what is cut off, at its upper end, and half of their last place: the expectation is the number itself to
2**-17 of a step.
"""

import triton
import triton.language as tl

from weft.operators.dropout.philox import random_bits
from weft.operators.quotient import divided

# ---- codes -----------------------------------------------------------------------------------------------------------


@triton.jit
def integer_code(y, bits, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """round(y) within ± LARGEST as int32; 0 for NaN. The bounds are between product and sum, which thus cannot become one
    multiply-add with another rounding."""
    bounded = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    if STOCHASTIC:
        q = tl.floor(bounded + uniform(bits)).to(tl.int32)
    else:
        q = (bounded + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2**23: its last place is 1
    return tl.where(y == y, q, 0)


@triton.jit
def uniform(bits):
    """The upper 16 bits as a number in (0, 1), exact in fp32."""
    return (bits >> 16).to(tl.int32).to(tl.float32) * 0.0000152587890625 + 0.00000762939453125  # 2**-16, 2**-17


@triton.jit
def float_code(y, bits, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The fp8 nearest to y within ± LARGEST, as int32; NaN is 0x7f."""
    word = y.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    not_a_number = magnitude > 0x7F800000
    CUT: tl.constexpr = 23 - MANTISSA
    bounded = tl.minimum(tl.where(not_a_number, 0.0, tl.abs(y)), LARGEST)
    a = bounded.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        added = (2 * (bits >> 16).to(tl.int32) + 1) << (CUT - 17)
        small = (bounded * (1 << (BIAS - 1 + MANTISSA)) + uniform(bits)).to(tl.int32)
    else:
        added = (1 << (CUT - 1)) - 1 + ((a >> CUT) & 1)
        ONE: tl.constexpr = 1 << (24 - BIAS - MANTISSA)  # its last place is the format's smallest step
        small = (bounded + ONE).to(tl.int32, bitcast=True) - ((151 - BIAS - MANTISSA) << 23)
    code = ((a + added) >> CUT) - ((127 - BIAS) << MANTISSA)
    code = tl.where(a < ((128 - BIAS) << 23), small, code)
    return tl.where(not_a_number, 0x7F, code | ((word >> 24) & 0x80))


@triton.jit
def encode(y, bits, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, HARDWARE: tl.constexpr):
    """y [R, C] as bytes: uint8 [R, C], of int4 [R, C / 2] with the even column in the lower half."""
    if FORMAT == "int8":
        return (integer_code(y, bits, 127.0, STOCHASTIC) & 255).to(tl.uint8)
    elif FORMAT == "int4":
        q = integer_code(y, bits, 7.0, STOCHASTIC)
        even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
        return ((even & 15) | ((odd & 15) << 4)).to(tl.uint8)
    elif FORMAT == "fp8_e4m3":
        if HARDWARE and not STOCHASTIC:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return float_code(y, bits, 448.0, 3, 7, STOCHASTIC).to(tl.uint8)
    else:
        if HARDWARE and not STOCHASTIC:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return float_code(y, bits, 57344.0, 2, 15, STOCHASTIC).to(tl.uint8)


@triton.jit
def decode(code, FORMAT: tl.constexpr):
    """Bytes [R, C] as exact fp32: [R, C], of int4 [R, 2 C]."""
    if FORMAT == "int8":
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT == "int4":
        word = code.to(tl.int32)
        both = tl.join((word << 28) >> 28, (word << 24) >> 28)
        return tl.reshape(both, [code.shape[0], code.shape[1] * 2]).to(tl.float32)
    elif FORMAT == "fp8_e4m3":
        word = code.to(tl.int32)
        moved = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True)
        exact = moved * 1.329227995784916e36  # 2**120: fp32's exponents begin 120 lower
        return tl.where((word & 0x7F) == 0x7F, float("nan"), exact)
    else:  # the upper half of an fp16
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


# ---- quantisation ----------------------------------------------------------------------------------------------------


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
    return tl.load(ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(
        tl.float32
    )  # hint: docs/notes/softmax.md


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
def write_apart(v_ptr, v_line, line, lines, code, room):
    """Codes [ROWS, BYTES] of the lines from ``line`` on. As a vector they are no part of the layout of x, whose loads are
    narrower where it begins anywhere: else a lane would load as many neighbours as it stores, one by one."""
    BYTES: tl.constexpr = code.shape[1]
    j = tl.arange(0, code.shape[0] * BYTES)
    row, byte = j // BYTES, j % BYTES
    at = v_ptr + (line + row) * v_line + byte
    tl.store(at, tl.reshape(code, [code.shape[0] * BYTES]), mask=(row < lines - line) & (byte < room))


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
    HARDWARE: tl.constexpr, APART: tl.constexpr,
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
    if APART:
        write_apart(v_ptr + o * v_outer, v_line, tile.to(tl.int64) * ROWS, lines, code, v_line)
    else:
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
    TAIL: tl.constexpr,
):  # fmt: skip
    """Of STRIP rows of BLOCK columns: partial [strips, N], or one number a program. WRAPPED: the rows are one stretch of memory
    that ends after ``total`` elements; with TAIL within a vector, so that its mask would split all vectors."""
    tiles = tl.cdiv(N, BLOCK)
    strip = (tl.program_id(0) // tiles).to(tl.int64) * STRIP
    col = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if TAIL:
        if (strip + STRIP) * N <= total:
            most = absmax_of_strip(x_ptr, strip, col, M, N, total, x_row, x_col, STRIP, ROWS, BLOCK, False)
        else:
            most = absmax_of_strip(x_ptr, strip, col, M, N, total, x_row, x_col, STRIP, ROWS, BLOCK, True)
    else:
        most = absmax_of_strip(x_ptr, strip, col, M, N, total, x_row, x_col, STRIP, ROWS, BLOCK, WRAPPED)
    if PER_COLUMN:
        tl.store(partial_ptr + (tl.program_id(0) // tiles).to(tl.int64) * N + col, tl.max(most, axis=0), mask=col < N)
    else:
        tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(most, axis=1), axis=0))


@triton.jit
def absmax_of_strip(
    x_ptr, strip, col, M, N, total, x_row, x_col,
    STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK], with CUT of what comes before ``total``."""
    most = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, STRIP, ROWS):
        row = strip + start + tl.arange(0, ROWS)
        inside = (row[:, None] < M) & (col[None, :] < N)
        if CUT:
            inside &= row[:, None] * N + col[None, :] < total
        most = tl.maximum(most, magnitude(read(x_ptr + row[:, None] * x_row + col[None, :] * x_col, inside)))
    return most


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
def tile_of(pid, lines, LENGTH, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr, BESIDE: tl.constexpr):
    """This program's outer index, first of ROWS lines and first column, and how many elements there are from there on. BESIDE:
    rows lie side by side; the outer index is of stretches of LENGTH columns, a line's that of a row."""
    across, down = tl.cdiv(LENGTH, BLOCK), tl.cdiv(lines, ROWS)
    first = (pid % across).to(tl.int64) * BLOCK
    o = (pid // across // down).to(tl.int64)
    line = (pid // across % down).to(tl.int64) * ROWS
    room = LENGTH - first
    if BESIDE:
        room = tl.minimum(LENGTH, N - o * LENGTH) - first
    elif RAGGED:
        room = tl.minimum(LENGTH, N - (line + tl.arange(0, ROWS)[:, None]) * LENGTH) - first
    return o, line, first, room


@triton.jit
def read_scale(s_ptr, o, i, col, s_outer, s_line, known, in_columns, MATRIX, BY: tl.constexpr, BESIDE: tl.constexpr):
    """The scales of lines [ROWS, 1], or BY ``column`` [1, BLOCK]. BY ``block``: o is a row of a batch of matrices of MATRIX
    rows (BESIDE: i is one of a single matrix), and 128 rows share their scales."""
    if BY == "column":
        return tl.load(s_ptr + col, mask=in_columns, other=1.0)
    else:
        if BY == "block" and BESIDE:
            i = i >> 7
        elif BY == "block":
            o = o // MATRIX * tl.cdiv(MATRIX, 128) + o % MATRIX // 128
        return tl.load(s_ptr + o * s_outer + i * s_line, mask=known, other=1.0)[:, None]


@triton.jit(do_not_specialize=["seed", "offset"])
def quantize_by_scale(
    x_ptr, v_ptr, s_ptr, seed_ptr, seed: tl.uint64, offset: tl.uint64,
    lines, LENGTH, N, MATRIX, x_outer, x_line, x_col, v_outer, v_line, r_outer, r_line, s_outer, s_line,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PER_BYTE: tl.constexpr, BY: tl.constexpr,
    BACKWARDS: tl.constexpr, RAGGED: tl.constexpr, BESIDE: tl.constexpr, RANDOM: tl.constexpr, PER: tl.constexpr,
    HARDWARE: tl.constexpr, APART: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Scales are there. BACKWARDS: the last tile first, since the pass before this one left it in L2. TAIL: lines end within a
    vector, and a mask for that would split all vectors."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0) if BACKWARDS else tl.program_id(0)
    o, line, first, room = tile_of(pid, lines, LENGTH, N, ROWS, BLOCK, RAGGED, BESIDE)
    left = bytes_of(room, v_line - first // PER_BYTE, PER_BYTE, RAGGED or BESIDE)
    if TAIL:  # noqa: SIM102 (a constant)
        if room >= BLOCK:
            quantize_tile(
                x_ptr, v_ptr, s_ptr, seed_ptr, seed, offset, o, line, first, BLOCK, BLOCK // PER_BYTE, lines, MATRIX,
                x_outer, x_line, x_col, v_outer, v_line, r_outer, r_line, s_outer, s_line,
                ROWS, BLOCK, FORMAT, PER_BYTE, BY, BESIDE, RANDOM, PER, HARDWARE, APART,
            )  # fmt: skip
            return
    quantize_tile(
        x_ptr, v_ptr, s_ptr, seed_ptr, seed, offset, o, line, first, room, left, lines, MATRIX,
        x_outer, x_line, x_col, v_outer, v_line, r_outer, r_line, s_outer, s_line,
        ROWS, BLOCK, FORMAT, PER_BYTE, BY, BESIDE, RANDOM, PER, HARDWARE, APART,
    )  # fmt: skip


@triton.jit
def quantize_tile(
    x_ptr, v_ptr, s_ptr, seed_ptr, seed, offset, o, line, first, room, left, lines, MATRIX,
    x_outer, x_line, x_col, v_outer, v_line, r_outer, r_line, s_outer, s_line,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PER_BYTE: tl.constexpr, BY: tl.constexpr,
    BESIDE: tl.constexpr, RANDOM: tl.constexpr, PER: tl.constexpr, HARDWARE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """ROWS lines of outer index o from column ``first`` on: ``room`` elements each, and ``left`` bytes of values."""
    i = line + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    x = read(x_ptr + o * x_outer + i[:, None] * x_line + (first + col) * x_col, (i[:, None] < lines) & (col < room))
    scale = read_scale(s_ptr, o, i, first + col, s_outer, s_line, i < lines, col < room, MATRIX, BY, BESIDE)
    bits = random_of(o * r_outer + i * r_line + first // 8, seed_ptr, seed, offset, BLOCK, PER, RANDOM)
    code = encode(x * tl.div_rn(1.0, scale), bits, FORMAT, RANDOM != "none", HARDWARE)
    v_ptr += o * v_outer + first // PER_BYTE
    if APART:
        write_apart(v_ptr, v_line, line, lines, code, left)
    else:
        write_values(v_ptr + i * v_line, code, i < lines, left)


@triton.jit(do_not_specialize=["seed", "offset"])
def quantize_flat(
    x_ptr, v_ptr, s_ptr, seed_ptr, seed: tl.uint64, offset: tl.uint64, total, N, factor, shift, x_row, x_col,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """One scale that is there, and rows of values that begin anywhere: values are one stretch of ``total`` bytes, whose rows
    are found by a multiplication (``quotient``). Nothing is random."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0) if BACKWARDS else tl.program_id(0)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    row = divided(at, factor, shift)
    x = read(x_ptr + row.to(tl.int64) * x_row + (at - row * N).to(tl.int64) * x_col, at < total)
    code = encode((x * tl.div_rn(1.0, tl.load(s_ptr)))[None, :], 0, FORMAT, False, HARDWARE)
    tl.store(v_ptr + at[None, :], code, mask=(at < total)[None, :])


@triton.jit
def dequantize_lines(
    v_ptr, s_ptr, out_ptr, lines, LENGTH, N, MATRIX, v_outer, v_line, v_col, out_outer, out_line, s_outer, s_line,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PER_BYTE: tl.constexpr, BY: tl.constexpr,
    RAGGED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """out = value * scale in fp32, rounded once."""
    o, line, first, room = tile_of(tl.program_id(0), lines, LENGTH, N, ROWS, BLOCK, RAGGED, BESIDE)
    i = line + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)[None, :]
    byte = tl.arange(0, BLOCK // PER_BYTE)[None, :]
    known = i[:, None] < lines
    at = v_ptr + o * v_outer + i[:, None] * v_line + (first // PER_BYTE + byte) * v_col
    code = tl.load(at, mask=known & (byte * PER_BYTE < room), other=0, eviction_policy="evict_last")
    scale = read_scale(s_ptr, o, i, first + col, s_outer, s_line, i < lines, col < room, MATRIX, BY, BESIDE)
    out = (decode(code, FORMAT) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + o * out_outer + i[:, None] * out_line + first + col, out, mask=known & (col < room))
