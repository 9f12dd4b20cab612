"""The multi-tensor kernels in Triton: one launch updates a list of tensors of any shape, dtype and group.

A program takes one chunk of one tensor. The chunk map says which; the tensor's row of the table has the addresses of its weight
and states, its size and its kind; what changes every step (addresses of gradients, numbers such as betas) is in other arrays.
The update itself is a rule (``rules.py``): a Triton function of registers.

Values in memory are plain, or a bf16 weight that is rounded stochastically or holds half of an fp32 master weight, or 8-bit
codes with one fp32 scale (the largest magnitude) for each block of neighbours.
"""

import triton
import triton.language as tl

from weft.operators.dropout.philox import random_bits
from weft.operators.optimizer import dynamic_map
from weft.operators.quantization.kernels import decode as decode_float
from weft.operators.quantization.kernels import encode as encode_float
from weft.operators.quantization.kernels import uniform

# A tensor's row in the table: 64-bit words, 128 bytes.
ROW = tl.constexpr(16)
PARAM = tl.constexpr(0)  # addresses: the weight,
STATES = tl.constexpr(1)  # the rule's states, then the lower halves of a split weight (SLOTS words),
STEP = tl.constexpr(6)  # the count of steps (fp32),
RATE = tl.constexpr(7)  # the learning rate (fp32); 0: it is among the numbers
SIZE = tl.constexpr(8)  # elements
CHUNKS = tl.constexpr(9)
KIND_OF = tl.constexpr(10)  # index into KINDS
GROUP = tl.constexpr(11)  # row of the numbers
SEED = tl.constexpr(12)  # of stochastic rounding
SCALES = tl.constexpr(13)  # addresses: of the states' blocks, for states in 8 bits (SCALED_STATES words)
SLOTS = 5
SCALED_STATES = 3

# A kind of tensor, which code is compiled for: a number of hexadecimal digits. These are their weights.
PARAM_TYPE = tl.constexpr(16**0)
GRAD_TYPE = tl.constexpr(16**1)
STATE_COUNT = tl.constexpr(16**2)  # the rule's states, without the lower half of a split weight
VARIANT = tl.constexpr(16**3)  # of the rule
ROUNDING = tl.constexpr(16**4)
COUNTED = tl.constexpr(16**5)  # whether the rule, or the rounding, needs the number of the step
STATE_TYPES = tl.constexpr(16**6)  # one after the other, SLOTS digits
# of states in 8 bits: log2 of the block / 128; 8 more where codes are rounded stochastically
CODES = tl.constexpr(16**11)
NEAREST, STOCHASTIC, SPLIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# What all launches of an optimizer share, fp32.
FACTOR = tl.constexpr(0)  # that gradients are multiplied by to clip them
FOUND = tl.constexpr(1)  # 1 where a gradient is not finite
NORM = tl.constexpr(2)  # of all gradients
SKIPPED = tl.constexpr(3)  # steps
CONTROLS = 4

# ---- loads and stores ------------------------------------------------------------------------------------------------
#
# Addresses are int64 scalars out of the table. WHOLE says that all of the chunk is there and every address is a multiple of 16
# bytes: then accesses are 16 bytes wide and have no mask.

NAN = tl.constexpr(0x7FC00000)
# dtypes, by number
FP32, FP16, BF16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INT16, BYTE = tl.constexpr(3), tl.constexpr(4)
POINTEES = tl.constexpr((tl.float32, tl.float16, tl.bfloat16, tl.int16, tl.uint8))


@triton.jit
def pointer(address, start, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    ptr = address.to(tl.pointer_type(POINTEES[TYPE]))
    if WHOLE:
        ptr = tl.multiple_of(ptr, 16)
    return ptr + start


@triton.jit
def load(address, start, mask, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    at = pointer(address, start, TYPE, WHOLE) + tl.arange(0, mask.shape[0])
    return tl.load(at) if WHOLE else tl.load(at, mask=mask, other=0)


@triton.jit
def store(address, start, mask, x, TYPE: tl.constexpr, WHOLE: tl.constexpr):
    at = pointer(address, start, TYPE, WHOLE) + tl.arange(0, mask.shape[0])
    tl.store(at, x.to(at.dtype.element_ty), mask=None if WHOLE else mask)


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
def noise_of(key, start, row, count, BLOCK: tl.constexpr):
    """16 random bits for each element (``philox.random_bits``): a function of the key, the tensor's row, the count of steps and
    the element's index."""
    part = start.to(tl.uint64) // 8 + tl.arange(0, BLOCK // 8)
    stream = (row.to(tl.uint64) << 32) | count.to(tl.uint64)
    return tl.reshape(random_bits(part, key, stream, 8), [BLOCK])


@triton.jit
def store_stochastic(weight, start, mask, x, seed, row, count, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """x as bf16, up or down with the probability that makes the expectation x: random bits are added below what remains."""
    noise = noise_of(seed.to(tl.uint64), start, row, count, BLOCK) >> 16
    store(weight, start, mask, ((bits_of(x) + noise.to(tl.int32)) >> 16), INT16, WHOLE)


# ---- 8-bit states ----------------------------------------------------------------------------------------------------
#
# Codes are of the dynamic map, or e4m3; e4m3 holds the root of a second moment, whose range a square would need twice. A block
# lies within a chunk, so the program that reads a block's scale is the one that writes it.

# Formats of 8-bit codes, numbered after the dtypes above.
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
def scale_indices(start, size, BLOCK: tl.constexpr, Q: tl.constexpr):
    blocks = start // Q + tl.arange(0, BLOCK // Q)
    return blocks, blocks * Q < size


@triton.jit
def blockwise(x, factor, Q: tl.constexpr):
    """x [BLOCK] times its block's factor [BLOCK / Q]."""
    R: tl.constexpr = x.shape[0] // Q
    return tl.reshape(tl.reshape(x, [R, Q]) * factor[:, None], [R * Q])


@triton.jit
def load_state(words, s: tl.constexpr, codebook, start, mask, KIND: tl.constexpr, WHOLE: tl.constexpr):
    TYPE: tl.constexpr = KIND // (STATE_TYPES * 16**s) % 16
    address = tl.load(words + STATES + s)
    if TYPE < SIGNED:
        x = load(address, start, mask, TYPE, WHOLE).to(tl.float32)
    else:
        Q: tl.constexpr = 128 * 2 ** (KIND // CODES % 8)
        code = load(address, start, mask, BYTE, WHOLE)
        blocks, there = scale_indices(start, tl.load(words + SIZE), mask.shape[0], Q)
        scales = tl.load(words + SCALES + s).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + blocks, mask=there, other=0.0)
        if TYPE == SIGNED:
            x = tl.gather(tl.load(codebook + tl.arange(0, 256)), code.to(tl.int32), 0)
        elif TYPE == UNSIGNED:
            x = tl.gather(tl.load(codebook + 256 + tl.arange(0, 256)), code.to(tl.int32), 0)
        else:
            x = decode_float(code, "fp8_e4m3") * 0.002232142857142857  # 1 / 448
            if TYPE == E4M3_ROOT:
                x *= x
        x = blockwise(x, scale, Q)
    return x


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
    blocks, there = scale_indices(start, size, x.shape[0], Q)
    tl.debug_barrier()  # no warp may still have to read the scales
    tl.store(scales.to(tl.pointer_type(tl.float32)) + blocks, largest, mask=there)


# ---- the step --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunks", "numbers", "scale", "found"])
def update(
    grads, table, chunks, numbers, arrivals, control, scale, found, codebook,
    RULE: tl.constexpr, KINDS: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr, CLIPPED: tl.constexpr, GUARDED: tl.constexpr, ZEROED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One step of all parameters.

    Args:
        grads: addresses of the gradients, int64, one for each row of the table.
        table: [rows, ROW] int64.
        chunks: int64, one for each program: row | chunk of that row << 32.
        numbers: [groups, NUMBERS] fp32: learning rate, sign (−1 maximises), then the rule's.
        arrivals: int32, one for each row: programs that have read the count of steps; 0 between launches.
        control: [CONTROLS] fp32.
        scale: of the loss, one fp32; gradients are divided by it (SCALED).
        found: one fp32; where it is not 0, nothing is updated and the step is counted as skipped (GUARDED).
        codebook: [512] fp32, what codes stand for (``dynamic_map``); not read where no state has any.
        RULE: a Triton function ``(p, g, states, step, lr, numbers, variant) -> p, states``.
        KINDS: the kinds of tensor there are.
        ZEROED: gradients are set to 0.
        HARDWARE: the machine has instructions that round to e4m3.
    """
    entry = tl.load(chunks + tl.program_id(0))
    row = entry & 0xFFFFFFFF
    words = table + row * ROW
    start = (entry >> 32) * BLOCK
    gradient = tl.load(grads + row)
    kind = tl.load(words + KIND_OF)
    skip = False
    if GUARDED:
        skip = tl.load(found) != 0
        if skip & (tl.program_id(0) == 0):
            tl.store(control + SKIPPED, tl.load(control + SKIPPED) + 1)
    factor = 1.0
    if CLIPPED:
        factor = tl.load(control + FACTOR)
    if SCALED:
        factor = tl.div_rn(factor, tl.load(scale).to(tl.float32))
    for k in tl.static_range(len(KINDS)):
        if kind == k:
            if not skip:
                addresses = gradient | tl.load(words + PARAM)
                for s in tl.static_range(KINDS[k] // STATE_COUNT % 16 + (KINDS[k] // ROUNDING % 16 == SPLIT)):
                    addresses |= tl.load(words + STATES + s)
                # a whole chunk whose addresses are multiples of 16 bytes goes in 16-byte accesses; any other element by element
                if (start + BLOCK <= tl.load(words + SIZE)) & ((addresses & 15) == 0):
                    advance(
                        words, gradient, start, row, numbers, arrivals, factor, codebook,
                        RULE, KINDS[k], NUMBERS, BLOCK, ZEROED, HARDWARE, True,
                    )  # fmt: skip
                else:
                    advance(
                        words, gradient, start, row, numbers, arrivals, factor, codebook,
                        RULE, KINDS[k], NUMBERS, BLOCK, ZEROED, HARDWARE, False,
                    )  # fmt: skip
            elif ZEROED:
                mask = tl.arange(0, BLOCK) < tl.minimum(tl.load(words + SIZE) - start, BLOCK).to(tl.int32)
                store(gradient, start, mask, tl.zeros([BLOCK], tl.float32), KINDS[k] // GRAD_TYPE % 16, False)


@triton.jit
def advance(
    words, gradient, start, row, numbers, arrivals, factor, codebook,
    RULE: tl.constexpr, KIND: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
    ZEROED: tl.constexpr, HARDWARE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Reads a chunk, applies the rule in fp32 registers, writes it back."""
    STATES_HERE: tl.constexpr = KIND // STATE_COUNT % 16
    HOW: tl.constexpr = KIND // ROUNDING % 16
    COUNT: tl.constexpr = KIND // COUNTED % 16
    mask = tl.arange(0, BLOCK) < tl.minimum(tl.load(words + SIZE) - start, BLOCK).to(tl.int32)
    weight = tl.load(words + PARAM)
    lower = tl.load(words + STATES + STATES_HERE)  # of a split weight; unused otherwise
    if HOW == SPLIT:
        p = load_split(weight, lower, start, mask, WHOLE)
    else:
        p = load(weight, start, mask, KIND // PARAM_TYPE % 16, WHOLE).to(tl.float32)
    g = load(gradient, start, mask, KIND // GRAD_TYPE % 16, WHOLE).to(tl.float32)
    states = ()
    for s in tl.static_range(STATES_HERE):
        state = load_state(words, s, codebook, start, mask, KIND, WHOLE)
        states = states + (state,)  # type: ignore[assignment] # noqa: RUF005

    line = numbers + tl.load(words + GROUP) * NUMBERS
    lr = tl.load(line)
    rate = tl.load(words + RATE)
    if rate != 0:
        lr = tl.load(rate.to(tl.pointer_type(tl.float32)))
    values = ()
    for n in tl.static_range(2, NUMBERS):
        values = values + (tl.load(line + n),)  # type: ignore[assignment] # noqa: RUF005
    g *= factor * tl.load(line + 1)
    count = 0.0
    step_ptr = tl.load(words + STEP).to(tl.pointer_type(tl.float32))
    if COUNT:
        # An atomic is done by one thread, which broadcasts it: once it is back, no thread of this program reads the
        # count again. A plain load would be done by every warp, and a late one could see what is written below.
        count = tl.atomic_add(step_ptr, 0.0, sem="relaxed")
    p, states = RULE(p, g, states, count + 1, lr, values, KIND // VARIANT % 16)

    if HOW == SPLIT:
        store_split(weight, lower, start, mask, p, WHOLE)
    elif HOW == STOCHASTIC:
        store_stochastic(weight, start, mask, p, tl.load(words + SEED), row, count, BLOCK, WHOLE)
    else:
        store(weight, start, mask, p, KIND // PARAM_TYPE % 16, WHOLE)
    for s in tl.static_range(STATES_HERE):
        store_state(words, s, start, mask, states[s], row, count, KIND, HARDWARE, WHOLE)
    if ZEROED:
        store(gradient, start, mask, tl.zeros_like(p), KIND // GRAD_TYPE % 16, WHOLE)
    if COUNT:
        chunks = tl.load(words + CHUNKS)
        if chunks == 1:
            tl.store(step_ptr, count + 1)
        else:
            # 1, but known only once the count is: so no program is counted as having read before it has
            read = tl.where(count >= 0, 1, 0)
            if tl.atomic_add(arrivals + row, read, sem="relaxed") == chunks - 1:
                tl.store(step_ptr, count + 1)
                tl.store(arrivals + row, 0)


@triton.jit
def store_state(
    words, s: tl.constexpr, start, mask, x, row, count,
    KIND: tl.constexpr, HARDWARE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = KIND // (STATE_TYPES * 16**s) % 16
    address = tl.load(words + STATES + s)
    if TYPE >= SIGNED:
        Q: tl.constexpr = 128 * 2 ** (KIND // CODES % 8)
        STOCHASTIC_CODES: tl.constexpr = KIND // CODES % 16 >= 8
        noise = tl.zeros([1], tl.uint32)
        if STOCHASTIC_CODES:
            key = tl.load(words + SEED).to(tl.uint64) ^ ((s + 1) << 61)  # not that of the weights
            noise = noise_of(key, start, row, count, x.shape[0])
        scales, size = tl.load(words + SCALES + s), tl.load(words + SIZE)
        store_codes(address, scales, start, mask, size, x, noise, TYPE, Q, STOCHASTIC_CODES, HARDWARE, WHOLE)
    else:
        store(address, start, mask, x, TYPE, WHOLE)


# ---- the norm of all gradients ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["chunks", "chunk_count", "scale", "found", "max_norm", "programs"])
def gradient_norm(
    grads, table, chunks, partial, arrivals, control, scale, found,
    chunk_count: tl.int32, programs: tl.int32, max_norm: tl.float32,
    KINDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """The 2-norm of all gradients together, the factor that clips it to ``max_norm``, and whether all are finite.

    Every program adds up its chunks in their order and writes one partial sum; the last one to arrive adds those up, as a tree
    over their indices. Neither depends on which program is last, so the same gradients give the same bits.

    Args:
        chunks: as in ``update``, of BLOCKS · BLOCK elements each.
        partial: [2, PARTS] fp32: sums of squares; 1 where something is not finite.
        arrivals: one int32, 0 between launches.
        GUARDED: what ``found`` holds counts as not finite too.
    """
    pid = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    # A chunk's entry is read two rounds before its gradient, its row of the table one before: else each round would wait for
    # memory three times, one after another.
    entry = tl.load(chunks + pid)
    gradient, kind, size = described(entry, grads, table)
    next_entry = tl.load(chunks + tl.minimum(pid + programs, chunk_count - 1))
    for c in range(pid, chunk_count, programs):
        next_gradient, next_kind, next_size = described(next_entry, grads, table)
        after = tl.load(chunks + tl.minimum(c + 2 * programs, chunk_count - 1))
        start = (entry >> 32) * (BLOCKS * BLOCK)
        whole = (start + BLOCKS * BLOCK <= size) & ((gradient & 15) == 0)
        for k in tl.static_range(len(KINDS)):
            if kind == k:
                if whole:
                    total, bad = add_squares(
                        total, bad, gradient, start, size, KINDS[k] // GRAD_TYPE % 16, BLOCKS, True
                    )
                else:
                    total, bad = add_squares(
                        total, bad, gradient, start, size, KINDS[k] // GRAD_TYPE % 16, BLOCKS, False
                    )
        entry, next_entry = next_entry, after
        gradient, kind, size = next_gradient, next_kind, next_size
    tl.store(partial + pid, tl.sum(total))
    tl.store(partial + PARTS + pid, tl.max(bad).to(tl.float32))
    if tl.atomic_add(arrivals, 1) == programs - 1:  # acquires what the others have released
        index = tl.arange(0, PARTS)
        squares = tl.load(partial + index, mask=index < programs, other=0.0, cache_modifier=".cg")
        flags = tl.load(partial + PARTS + index, mask=index < programs, other=0.0, cache_modifier=".cg")
        norm = tl.sqrt_rn(tl.sum(squares))
        if SCALED:
            norm = tl.div_rn(norm, tl.load(scale).to(tl.float32))
        flag = tl.max(flags)
        if GUARDED:
            flag = tl.maximum(flag, (tl.load(found) != 0).to(tl.float32))
        # as torch.nn.utils.clip_grad_norm_ has it; a norm that is NaN gives NaN
        tl.store(control + FACTOR, tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0, tl.PropagateNan.ALL))
        tl.store(control + FOUND, flag)
        tl.store(control + NORM, norm)
        tl.store(arrivals, 0)


@triton.jit
def described(entry, grads, table):
    """Of the tensor that a chunk is of: its gradient's address, its kind, its size."""
    row = entry & 0xFFFFFFFF
    words = table + row * ROW
    return tl.load(grads + row), tl.load(words + KIND_OF), tl.load(words + SIZE)


@triton.jit
def add_squares(total, bad, gradient, start, size, TYPE: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr):
    """Adds a chunk of some blocks to the sums of squares and the marks of what is not finite; reads all of it first."""
    BLOCK: tl.constexpr = total.shape[0]
    read = ()
    for b in tl.static_range(BLOCKS):
        here = start + b * BLOCK
        mask = tl.arange(0, BLOCK) < tl.minimum(size - here, BLOCK).to(tl.int32)
        read = read + (load(gradient, here, mask, TYPE, WHOLE),)  # type: ignore[assignment] # noqa: RUF005
    for b in tl.static_range(BLOCKS):
        g = read[b].to(tl.float32)  # type: ignore[var-annotated]
        total += g * g
        bad |= (tl.abs(g) < float("inf")).to(tl.int32) ^ 1  # NaN compares as false
    return total, bad
