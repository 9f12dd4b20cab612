"""The Triton kernel of products of few rows with a quantised weight, and its plan.

Products go to tensor cores, which leaves multiprocessors to unpacking: a shift, a mask and a fused multiply-add for a pair of
weights (docs/notes/low_precision.md). The mask leaves two codes u in the halves of a register, which read as 16-bit floats are
u times the smallest subnormal. One multiply-add with a power of two brings them up into normal numbers and takes the zero
point away, (u - zero) · unit, without rounding; the scale, divided by the unit, multiplies a group's fp32 sum afterwards. Pairs
are neighbours in the prepared layout (:mod:`weft.operators.low_precision.quantized_weight`) and where tensor cores expect them.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, constants_of, grid_of
from weft.operators.launch import INTERPRETING, Plan
from weft.operators.linear.gemv import shared_limit, store_rows, vector_length
from weft.operators.low_precision.quantized_weight import BITS, SLICE, QuantizedWeight, block, slices
from weft.operators.partial_sums import SplitPlan, in_parts, parts_of

# M rows of x, N rows of w, K columns of both


@triton.jit
def fp8_at_16_bits(codes, WIDE: tl.constexpr):
    """Two e4m3 codes in the upper bytes of a word's halves as fp16 · 2⁻⁸ (or, WIDE, bf16 · 2⁻¹²⁰): moved, not converted."""
    if WIDE:
        return (codes & -0x7FFF8000) | ((codes >> 4) & 0x07F007F0)
    return (codes & -0x7FFF8000) | ((codes >> 1) & 0x3F803F80)


@triton.jit
def unpacked(
    words, zero, SLICE: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr, DTYPE: tl.constexpr,
    BITS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A slice of a chunk, [ROWS, LENGTH] of DTYPE: (code - zero), or fp8's value, times the unit (``unit_of``)."""
    BF16: tl.constexpr = DTYPE.is_bf16()
    FP32: tl.constexpr = DTYPE.is_fp32()
    HALF: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    if FP8:
        pairs = fp8_at_16_bits(words << 8 if SLICE == 0 else words, BF16)
    else:
        pairs = (words >> (BITS * SLICE)) & (0x000F000F if BITS == 4 else 0x00FF00FF)
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    if FP32 and not FP8:
        low, high = low.to(tl.float32), high.to(tl.float32)
    else:
        low, high = low.to(HALF, bitcast=True), high.to(HALF, bitcast=True)
    values = tl.reshape(tl.join(low, high), [ROWS, LENGTH])
    if FP8:
        if BF16:
            values = tl.fma(values, tl.full([ROWS, LENGTH], 2.0**120, HALF), tl.full([ROWS, LENGTH], 0.0, HALF))
        values = values.to(DTYPE)
    elif FP32:
        values -= zero
    else:
        up = tl.full([ROWS, LENGTH], 2.0**127 if BF16 else 2.0**15, HALF)
        below = (zero * (-(2.0**-6) if BF16 else -(2.0**-9))).to(HALF)
        values = tl.fma(values, up, tl.broadcast_to(below, [ROWS, LENGTH]))
    return values


@triton.jit
def weight_only_tiled(
    x_ptr, words_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, k_vectors, steps,
    x_row, x_col, scale_row, scale_group, zero_row, zero_group, bias_col,
    BITS: tl.constexpr, FP8: tl.constexpr, UNIT: tl.constexpr, LENGTH: tl.constexpr, SLICES: tl.constexpr,
    CHUNKS: tl.constexpr, GROUPED: tl.constexpr, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, VEC: tl.constexpr, EVEN_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_N columns of y for TOKENS rows as w · xᵀ, in steps of CHUNKS chunks of SLICES slices of
    LENGTH columns. A slice has one scale a row (GROUPED), or the whole row has. UNIT is the reciprocal of ``unit_of``. Rows of
    w past the edge wrap around to valid ones and are not stored; rows of x past it are not read."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row = (n % N).to(tl.int64)
    K = k_vectors * VEC
    k = tl.arange(0, LENGTH)
    word = tl.arange(0, LENGTH // 2)
    each = tl.cdiv(steps, SPLIT)
    first = tl.program_id(1) * each
    last = min(first + each, steps)
    words = words_ptr + row[:, None] * (steps * (CHUNKS * LENGTH // 2)) + word[None, :]
    words += first * (CHUNKS * LENGTH // 2)
    column = first * (CHUNKS * SLICES * LENGTH)
    x = x_ptr + m.to(tl.int64)[None, :] * (x_row * VEC) + (column + k).to(tl.int64)[:, None] * x_col
    scales = scale_ptr + row * scale_row
    zeros = zero_ptr + row * zero_row
    group = (first * (CHUNKS * SLICES)).to(tl.int64)
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for _ in range(first, last):
        for i in tl.static_range(CHUNKS * SLICES):
            if i % SLICES == 0:
                codes = tl.load(words + i // SLICES * (LENGTH // 2), eviction_policy="evict_first")
            there = m[None, :] < M if EVEN_K else (m[None, :] < M) & (column + i * LENGTH + k[:, None] < K)
            x_tile = tl.load(x + i * LENGTH * x_col, mask=there, other=0.0)
            inside = True if EVEN_K else column + i * LENGTH < K
            if HAS_ZERO:
                zero = tl.load(zeros + (group + i) * zero_group, mask=inside, other=0).to(tl.float32)[:, None]
            else:
                zero = tl.full([BLOCK_N, 1], ZERO, tl.float32)
            w_tile = unpacked(codes, zero, i % SLICES, BLOCK_N, LENGTH, x_ptr.dtype.element_ty, BITS, FP8)
            if GROUPED:
                scale = tl.load(scales + (group + i) * scale_group, mask=inside, other=0.0).to(tl.float32)
                acc += tl.dot(w_tile, x_tile, input_precision="ieee") * (scale * UNIT)[:, None]
            else:
                acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
        words += CHUNKS * LENGTH // 2
        x += CHUNKS * SLICES * LENGTH * x_col
        column += CHUNKS * SLICES * LENGTH
        group += CHUNKS * SLICES
    if not GROUPED:
        acc *= (tl.load(scales).to(tl.float32) * UNIT)[:, None]
    store_rows(y_ptr, bias_ptr, bias_col, acc, m, n, M, N, tl.program_id(1), HAS_BIAS)


@triton.jit
def dequantized_chunk(
    words_ptr, scale_ptr, zero_ptr, w_ptr, N, K, chunks, words_row, scale_row, scale_group, zero_row, zero_group,
    BITS: tl.constexpr, FP8: tl.constexpr, UNIT: tl.constexpr, LENGTH: tl.constexpr, SLICES: tl.constexpr,
    GROUPED: tl.constexpr, ZERO: tl.constexpr, HAS_ZERO: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The values of one chunk of ROWS rows, rounded once into w [N, K]; neighbouring programs have neighbouring chunks."""
    chunk = tl.program_id(0) % chunks
    n = tl.program_id(0) // chunks * ROWS + tl.arange(0, ROWS)
    row, inside = n.to(tl.int64), n < N
    word = chunk * (LENGTH // 2) + tl.arange(0, LENGTH // 2)
    codes = tl.load(words_ptr + row[:, None] * words_row + word[None, :], mask=inside[:, None], other=0)
    for i in tl.static_range(SLICES):
        group = chunk * SLICES + i
        column = group * LENGTH + tl.arange(0, LENGTH)
        there = inside & (group * LENGTH < K)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + row * zero_row + group.to(tl.int64) * zero_group, mask=there, other=0)
            zero = zero.to(tl.float32)[:, None]
        else:
            zero = tl.full([ROWS, 1], ZERO, tl.float32)
        if GROUPED:
            scale = tl.load(scale_ptr + row * scale_row + group.to(tl.int64) * scale_group, mask=there, other=0.0)
        else:
            scale = tl.load(scale_ptr + row * scale_row, mask=inside, other=0.0)
        values = unpacked(codes, zero, i, ROWS, LENGTH, tl.float32, BITS, FP8) * (scale.to(tl.float32) * UNIT)[:, None]
        at = w_ptr + row[:, None] * K + column[None, :]
        tl.store(at, values.to(w_ptr.dtype.element_ty), mask=inside[:, None] & (column[None, :] < K))


def unit_of(dtype: torch.dtype, format: str) -> float:
    """What one code step, or fp8's one, is in what ``unpacked`` returns: the scale is multiplied by its reciprocal."""
    if format == "fp8":
        return 1.0 if dtype == torch.bfloat16 else 2.0**-8
    return {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1.0}[dtype]


def heuristic(sm: int, dtype: torch.dtype, format: str, group: int, m: int, n: int, k: int) -> Config:
    """Two or three programs a multiprocessor, each 64 rows of w (x comes out of L2 once for each), sums split to get them."""
    if INTERPRETING:
        return {"BLOCK_N": 32, "TOKENS": max(m, 16), "SPLIT": 2, "num_warps": 4, "num_stages": 2}
    if dtype == torch.float32:  # multiplied without tensor cores
        return {"BLOCK_N": 32, "TOKENS": 8, "SPLIT": max(1, 256 * 32 // n), "num_warps": 4, "num_stages": 2}
    tokens = min(max(m, 8), 32 if format == "int4" or shared_limit(sm) < 2**17 else 64)
    stages = next((s for s in (4, 3) if 2 * _shared(64, tokens, dtype, format, s) <= shared_limit(sm)), 2)
    return {"BLOCK_N": 64, "TOKENS": tokens, "SPLIT": max(1, 256 * 64 // n), "num_warps": 4, "num_stages": stages}


def _shared(block_n: int, tokens: int, dtype: torch.dtype, format: str, stages: int) -> int:
    """Bytes of the words and of x that lie in shared memory at a time."""
    return (block_n * SLICE * 2 + tokens * block(format) * dtype.itemsize) * stages


def candidates(sm: int, dtype: torch.dtype, format: str, group: int, m: int, n: int, k: int) -> Iterator[Config]:
    splits = tuple(s for s in (1, 2, 4, 8) if s == 1 or s * n <= 32768)
    tokens = (8, 16) if m <= 8 else (m,) if m <= 32 else (32, 64)
    choices = {"BLOCK_N": (16, 32, 64, 128), "TOKENS": tokens, "SPLIT": splits}
    for c in grid_of({**choices, "num_warps": (1, 2, 4, 8), "num_stages": (2, 4)}):
        rows = c["BLOCK_N"] // c["num_warps"]
        if 16 <= rows <= 32 and _shared(c["BLOCK_N"], c["TOKENS"], dtype, format, c["num_stages"]) <= shared_limit(sm):
            yield c


configuration = Configurations(__file__, "weight_only_matmul", heuristic, candidates)


def plan(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Plan | SplitPlan:
    """Of ``(x, words, scale, zero, bias, y)`` into a new row-major y [M, N] of x's dtype; any tensor is passed for zero points
    or a bias that are not there."""
    words, scale, zero, format, group, _ = weight
    (m, k), n = x.shape, words.shape[0]
    config = configuration(x.device, x.dtype, format, group, min(bucket(m), 64), bucket(n), bucket(k))
    tokens, block_n = config["TOKENS"], config["BLOCK_N"]
    vec, length = vector_length(x), group or SLICE
    chunks = min(SLICE // length, 2)  # of a step: four leave short slices too few registers
    steps = triton.cdiv(k, block(format)) * (SLICE // (length * chunks))
    split = parts_of(config["SPLIT"], steps)
    of_scales = scale.stride() if group else (scale.stride(0), 0)
    strides = [x.stride(0) // vec, x.stride(1), *of_scales, *((0, 0) if zero is None else zero.stride())]
    codes = {"BITS": BITS[format], "FP8": format == "fp8", "ZERO": 128.0 if format == "int8" else 8.0}
    there = {"GROUPED": bool(group), "HAS_ZERO": zero is not None, "HAS_BIAS": bias is not None}
    columns = {"LENGTH": length, "SLICES": slices(format), "CHUNKS": chunks, "EVEN_K": k % block(format) == 0}
    tile = {**constants_of(config), "SPLIT": split, "VEC": vec}
    constants = {**codes, **there, **columns, **tile, "UNIT": 1 / unit_of(x.dtype, format)}
    scalars = (m, n, k // vec, steps, *strides, 0 if bias is None else bias.stride(0))
    grid = (triton.cdiv(n, block_n), split, triton.cdiv(m, tokens))
    launch = Plan(weight_only_tiled, grid, scalars, constants, config["num_warps"], config["num_stages"])
    return in_parts(launch, split, m * n)


class DequantizedPlan:
    """Of ``(x, words, scale, zero, bias, y)`` into a new row-major y [M, N]: the weight's values in x's dtype, in memory of
    N · K elements, and PyTorch's product."""

    def __init__(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None):
        words, scale, zero, format, group, k = weight
        n, length, rows = len(words), group or SLICE, 16
        chunks = block(format) // (slices(format) * length) * triton.cdiv(k, block(format))
        strides = (*(scale.stride() if group else (scale.stride(0), 0)), *((0, 0) if zero is None else zero.stride()))
        constants = {
            "BITS": BITS[format], "FP8": format == "fp8", "UNIT": 1 / unit_of(torch.float32, format), "LENGTH": length,
            "SLICES": slices(format), "GROUPED": bool(group), "ZERO": 128.0 if format == "int8" else 8.0,
            "HAS_ZERO": zero is not None, "ROWS": rows,
        }  # fmt: skip
        grid = (triton.cdiv(n, rows) * chunks,)
        self.launch = Plan(dequantized_chunk, grid, (n, k, chunks, words.stride(0), *strides), constants, 4)
        self.shape, self.biased = (n, k), bias is not None

    def __call__(self, x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, y: Tensor) -> None:
        w = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        self.launch(words, scale, zero, w)
        if self.biased:
            torch.addmm(bias, x, w.t(), out=y)
        else:
            torch.mm(x, w.t(), out=y)
