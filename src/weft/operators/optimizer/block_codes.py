"""States in 8 bits: one code an element, one fp32 (the largest magnitude) for each block of neighbours in memory, in Triton.

Codes are of the dynamic map, or e4m3; the root of a second moment is what e4m3 holds, whose range a square would need twice. A
block lies within a chunk, so the program that reads a block's scale is the one that writes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.dropout.philox import random_bits
from weft.operators.optimizer import dynamic_map
from weft.operators.optimizer.storage import BYTE, load, store
from weft.operators.quantization.kernels import decode as decode_float
from weft.operators.quantization.kernels import encode as encode_float
from weft.operators.quantization.kernels import uniform

# What a code stands for, by number: behind the dtypes of storage.py.
SIGNED, UNSIGNED, E4M3, E4M3_ROOT = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)

# The lines of dynamic_map, moved so that rounding to nearest gives n (signed) or n - 1 (unsigned).
SIGNED_INTERVALS = tl.constexpr(dynamic_map.fp32_pairs(dynamic_map.interval_lines(True), -0.5))
UNSIGNED_INTERVALS = tl.constexpr(dynamic_map.fp32_pairs(dynamic_map.interval_lines(False), -1.5))
SIGNED_VALUES = tl.constexpr(dynamic_map.fp32_pairs(dynamic_map.value_lines(True), -0.5))
UNSIGNED_VALUES = tl.constexpr(dynamic_map.fp32_pairs(dynamic_map.value_lines(False), -1.5))
MAGIC = tl.constexpr(1.5 * 2**23)  # its last place is 1
SMALLEST = tl.constexpr(2.0**-126)  # a block whose largest magnitude is below counts as 0
ABOVE = tl.constexpr(1 + 2.0**-20)  # so that the largest magnitude, times its rounded inverse, is not below 1


@triton.jit
def least(y, LINES: tl.constexpr, COUNT: tl.constexpr):
    x = y * LINES[0] + LINES[1]
    for i in tl.static_range(1, COUNT):
        x = tl.minimum(x, y * LINES[2 * i] + LINES[2 * i + 1])
    return x


@triton.jit
def map_code(y, x, noise, SIGN: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The code of y in [0, 1], the magnitude of x by its block's largest: as ``dynamic_map.encode`` has it."""
    TOP: tl.constexpr = 127.5 if SIGN else 254.5
    if STOCHASTIC:
        place = least(y, SIGNED_VALUES, 13) if SIGN else least(y, UNSIGNED_VALUES, 14)
        place += tl.maximum(place - (TOP - 0.5), 0.0)
        place = tl.where(y >= 1.0, TOP + 0.5, tl.floor(place + uniform(noise)))
    else:
        place = least(y, SIGNED_INTERVALS, 7) if SIGN else least(y, UNSIGNED_INTERVALS, 7)
    if SIGN:
        bits = place.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -0x80000000)
        n = tl.maximum(bits.to(tl.float32, bitcast=True) + (MAGIC + 127), MAGIC)
    else:
        n = tl.where(y > 0, tl.maximum(place + MAGIC, MAGIC + 1), MAGIC)
    return n.to(tl.int32, bitcast=True)  # its lowest byte


@triton.jit
def scale_places(start, size, BLOCK: tl.constexpr, Q: tl.constexpr):
    blocks = start // Q + tl.arange(0, BLOCK // Q)
    return blocks, blocks * Q < size


@triton.jit
def blockwise(x, factor, Q: tl.constexpr):
    """x [BLOCK] times its block's factor [BLOCK / Q]."""
    R: tl.constexpr = x.shape[0] // Q
    return tl.reshape(tl.reshape(x, [R, Q]) * factor[:, None], [R * Q])


@triton.jit
def load_codes(address, scales, codebook, start, mask, size, TYPE: tl.constexpr, Q: tl.constexpr, WHOLE: tl.constexpr):
    code = load(address, start, mask, BYTE, WHOLE)
    blocks, there = scale_places(start, size, mask.shape[0], Q)
    scale = tl.load(scales.to(tl.pointer_type(tl.float32)) + blocks, mask=there, other=0.0)
    if TYPE == SIGNED:
        x = tl.gather(tl.load(codebook + tl.arange(0, 256)), code.to(tl.int32), 0)
    elif TYPE == UNSIGNED:
        x = tl.gather(tl.load(codebook + 256 + tl.arange(0, 256)), code.to(tl.int32), 0)
    else:
        x = decode_float(code, "fp8_e4m3") * 0.002232142857142857  # 1 / 448
        if TYPE == E4M3_ROOT:
            x *= x
    return blockwise(x, scale, Q)


@triton.jit
def store_codes(
    address, scales, start, mask, size, x, noise,
    TYPE: tl.constexpr, Q: tl.constexpr, STOCHASTIC: tl.constexpr, HARDWARE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    if not WHOLE:
        x = tl.where(mask, x, 0.0)
    R: tl.constexpr = x.shape[0] // Q
    # as integers, of which NaN is the largest: a block with one is lost, and seen to be
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.reshape(magnitude, [R, Q]), axis=1).to(tl.float32, bitcast=True)
    sound = (largest >= SMALLEST) & (largest < float("inf"))
    y = blockwise(tl.abs(x), tl.where(sound, tl.div_rn(ABOVE, largest), 0.0), Q)
    if TYPE == SIGNED:
        code = map_code(y, x, noise, True, STOCHASTIC)
    elif TYPE == UNSIGNED:
        code = map_code(y, x, noise, False, STOCHASTIC)
    elif TYPE == E4M3:
        signed = tl.where(x < 0, -y, y)
        code = encode_float(signed * 448.0, noise, "fp8_e4m3", STOCHASTIC, HARDWARE).to(tl.int32)
    else:
        code = encode_float(tl.sqrt(y) * 448.0, noise, "fp8_e4m3", STOCHASTIC, HARDWARE).to(tl.int32)
        code = tl.where(y > 0, tl.maximum(code, 1), code)
    store(address, start, mask, code, BYTE, WHOLE)
    blocks, there = scale_places(start, size, x.shape[0], Q)
    tl.debug_barrier()  # no warp may still have to read the scales
    tl.store(scales.to(tl.pointer_type(tl.float32)) + blocks, largest, mask=there)


@triton.jit
def code_noise(seed, state: tl.constexpr, start, row, count, BLOCK: tl.constexpr):
    """16 random bits for each element (``philox.random_bits``): a function of the seed, the state's number, the tensor's row,
    the count of steps and the element's place. Other than those that round weights."""
    part = start.to(tl.uint64) // 8 + tl.arange(0, BLOCK // 8)
    stream = (row.to(tl.uint64) << 32) | count.to(tl.uint64)
    key = seed.to(tl.uint64) ^ ((state + 1) << 61)
    return tl.reshape(random_bits(part, key, stream, 8), [BLOCK])
