"""How values lie in memory: plainly, or a bf16 weight that is rounded stochastically or holds half of an fp32 master weight.

Addresses are int64 scalars out of the table. WHOLE says that all of the chunk is there and every address is a multiple of 16
bytes: then accesses are 16 bytes wide and have no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.dropout.philox import random_bits

NAN = tl.constexpr(0x7FC00000)


# dtypes, by number
FP32, FP16, BF16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INT16, BYTE = tl.constexpr(3), tl.constexpr(4)


@triton.jit
def pointer(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    if TYPE == FP32:
        ptr = address.to(tl.pointer_type(tl.float32))
    elif TYPE == FP16:
        ptr = address.to(tl.pointer_type(tl.float16))
    elif TYPE == BF16:
        ptr = address.to(tl.pointer_type(tl.bfloat16))
    elif TYPE == BYTE:
        ptr = address.to(tl.pointer_type(tl.uint8))
    else:
        ptr = address.to(tl.pointer_type(tl.int16))
    if WHOLE:
        ptr = tl.multiple_of(ptr, 16)
    return ptr + start


@triton.jit
def load(address, start, mask, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    ptr = pointer(address, start, TYPE, WHOLE)
    if WHOLE:
        x = tl.load(ptr + tl.arange(0, mask.shape[0]))
    else:
        x = tl.load(ptr + tl.arange(0, mask.shape[0]), mask=mask, other=0)
    return x


@triton.jit
def store(address, start, mask, x, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    ptr = pointer(address, start, TYPE, WHOLE)
    x = x.to(ptr.dtype.element_ty)
    if WHOLE:
        tl.store(ptr + tl.arange(0, mask.shape[0]), x)
    else:
        tl.store(ptr + tl.arange(0, mask.shape[0]), x, mask=mask)


@triton.jit
def bits_of(x):
    """An fp32's bits, int32; every NaN is the one whose lower half is 0 (adding to another could carry into its sign)."""
    return tl.where(x == x, x.to(tl.int32, bitcast=True), NAN)


@triton.jit
def load_split(weight, lower, start, mask, WHOLE: tl.constexpr):
    """An fp32 master weight: a bf16 weight, which is the master rounded, and 16 bits that say by how much."""
    high = load(weight, start, mask, INT16, WHOLE).to(tl.int32)
    low = load(lower, start, mask, INT16, WHOLE).to(tl.int32)
    return ((high << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def store_split(weight, lower, start, mask, x, WHOLE: tl.constexpr):
    """The inverse of :func:`load_split`. A tie is rounded away from 0, which leaves a remainder of -0x8000 … 0x7FFF."""
    bits = bits_of(x)
    store(weight, start, mask, ((bits + 0x8000) >> 16), INT16, WHOLE)
    store(lower, start, mask, bits, INT16, WHOLE)


@triton.jit
def store_stochastic(weight, start, mask, x, seed, row, count, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """x as bf16, up or down with the probability that makes the expectation x: 16 random bits, a function of the seed, the
    tensor's row, the count of steps and the element's place, are added below what is kept."""
    part = start.to(tl.uint64) // 8 + tl.arange(0, BLOCK // 8)
    stream = (row.to(tl.uint64) << 32) | count.to(tl.uint64)
    noise = tl.reshape(random_bits(part, seed.to(tl.uint64), stream, 8), x.shape) >> 16
    store(weight, start, mask, ((bits_of(x) + noise.to(tl.int32)) >> 16), INT16, WHOLE)
