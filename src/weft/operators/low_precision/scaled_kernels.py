"""The Triton kernel of products of 8-bit operands with scales, and its plan.

Tensor cores multiply fp8 and int8 twice as fast as bf16. Where a card has none for fp8 (before sm_89), and in the interpreter,
codes are decoded to fp16, which holds every fp8 exactly. Scales of a tensor, a row of A or a column of B multiply the finished
sum; scales of blocks multiply the sum of each 128 terms of K, which is added up in fp32 outside of the tensor core: its own
accumulator of fp8 products keeps about 14 bits (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, constants_of, grid_of
from weft.operators.cuda import pointer_aligned
from weft.operators.hopper.padded import copied_to, up_to
from weft.operators.launch import INTERPRETING, Plan, multiprocessors, target_sm
from weft.operators.linear.gemv import shared_limit
from weft.operators.matmul.kernels import tile, tile_of
from weft.operators.quantization.formats import format_of
from weft.operators.quantization.kernels import decode

BLOCK = 128  # terms of K, and columns of B, that share a scale
NATIVE_FP8 = 89  # the first architecture whose tensor cores take fp8


@triton.jit
def read(ptr, mask, FORMAT: tl.constexpr, DECODED: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        codes = tl.load(ptr, mask=mask, other=0)
    else:
        codes = tl.load(ptr)
    if DECODED:
        return decode(codes, FORMAT).to(tl.float16)
    elif FORMAT == "int8":
        return codes.to(tl.int8, bitcast=True)
    elif FORMAT == "fp8_e4m3":
        return codes.to(tl.float8e4nv, bitcast=True)
    else:
        return codes.to(tl.float8e5, bitcast=True)


@triton.jit
def scaled_tiled(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, c_ptr, M, N, K, a_row, a_col, b_row, b_col, a_scale_row, a_scale_col,
    b_scale_row, b_scale_col, bias_step,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, DECODED: tl.constexpr, BLOCKWISE: tl.constexpr, HAS_BIAS: tl.constexpr,
    IMPRECISE: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """C = (A · B) scaled, plus a bias [N]; A [M, K], B [K, N] as bytes. A scale that many elements share has strides of 0."""
    m, n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    k = tl.arange(0, BLOCK_K)
    row, column = (m % M).to(tl.int64), (n % N).to(tl.int64)
    a = a_ptr + row[:, None] * a_row + k[None, :].to(tl.int64) * a_col
    b = b_ptr + k[:, None].to(tl.int64) * b_row + column[None, :] * b_col
    a_scale = a_scale_ptr + row * a_scale_row
    b_scale = b_scale_ptr + (column // 128 if BLOCKWISE else column) * b_scale_col
    INTEGER: tl.constexpr = A_FORMAT == "int8" and not DECODED
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGER and not BLOCKWISE else tl.float32)
    for start in range(0, K, BLOCK_K):
        left = k < K - start
        a_tile = read(a, left[None, :], A_FORMAT, DECODED, not EVEN_K)
        b_tile = read(b, left[:, None], B_FORMAT, DECODED, not EVEN_K)
        if BLOCKWISE:
            if INTEGER:
                part = tl.dot(a_tile, b_tile, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(a_tile, b_tile)
            acc += part * (tl.load(a_scale)[:, None] * tl.load(b_scale)[None, :])
            a_scale += a_scale_col
            b_scale += b_scale_row
        elif INTEGER:
            acc = tl.dot(a_tile, b_tile, acc, out_dtype=tl.int32)
        elif IMPRECISE:
            acc = tl.dot(a_tile, b_tile, acc)
        else:
            acc = tl.dot(a_tile, b_tile, acc, max_num_imprecise_acc=BLOCK_K)
        a += BLOCK_K * a_col
        b += BLOCK_K * b_row
    c = acc.to(tl.float32)
    if not BLOCKWISE:
        c *= tl.load(a_scale)[:, None] * tl.load(b_scale)[None, :]
    if HAS_BIAS:
        c += tl.load(bias_ptr + column * bias_step).to(tl.float32)[None, :]
    at = c_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, c.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def heuristic(sm: int, sums: int, blockwise: bool, m: int, n: int, k: int) -> Config:
    """As for 16 bits with twice the terms of K; two sets of sums in registers leave half the tile, decoding half the terms."""
    if INTERPRETING:
        return tile(32, 64, 128 if blockwise else 64, 4, 2)
    depth = 128 if blockwise or sm >= NATIVE_FP8 else 64
    if m * n <= 1024 * 1024 or min(m, n) <= 64:
        return tile(64, 64, 128 if blockwise else 64, 4, 3)
    if sm in (90, 100) and sums == 1:
        return tile(128, 256, depth, 8, 3)
    return tile(128, 64 if blockwise and sm < NATIVE_FP8 else 128, depth, 8, 2 if sm in (86, 89, 120) else 3)


def candidates(sm: int, sums: int, blockwise: bool, m: int, n: int, k: int) -> Iterator[Config]:
    sizes, limit = (64, 128, 256), shared_limit(sm)
    columns, deep = ((64, 128), (128,)) if blockwise else (sizes, sizes)
    tiles = {"BLOCK_M": sizes, "BLOCK_N": columns, "BLOCK_K": deep, "GROUP": (8,)}
    for c in grid_of({**tiles, "num_warps": (4, 8), "num_stages": (3, 4, 5)}):
        registers = c["BLOCK_M"] * c["BLOCK_N"] // (c["num_warps"] * 32) * sums
        shared = (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * c["num_stages"]
        if 32 <= registers <= 128 and limit // 4 <= shared <= limit:
            yield c


configuration = Configurations(__file__, "scaled_matmul", heuristic, candidates)


def steps_of(scale: Tensor) -> tuple[int, int]:
    """Strides of a scale [rows, columns] (or of a single number), 0 along dimensions of one element."""
    if scale.numel() == 1:  # of any shape: [], [1] or [1, 1]
        return 0, 0
    row, column = (s if n > 1 else 0 for s, n in zip(scale.stride(), scale.shape, strict=True))
    return row, column


def aligned(t: Tensor) -> bool:
    """Whether rows of codes begin on 16 bytes; of others each byte is loaded by itself."""
    return (t.stride(1) == 1 or t.shape[1] == 1) and t.stride(0) % 16 == 0 and pointer_aligned(t)


def plan(c: Any) -> Any:
    """Of ``(a, b, a_scale, b_scale, bias, out)`` for a call of ``scaled_matmul``. Rows of codes that do not begin on 16 bytes
    are copied, with zeros up to whole steps, where a multiprocessor takes more than one step of K."""
    (m, k), n, whole = c.a.shape, c.b.shape[1], up_to(c.a.shape[1], BLOCK)
    rows = (c.a, c.b.t())
    copies = [k > 0 and not (aligned(t) and k % 16 == 0) for t in rows]
    waves = triton.cdiv(triton.cdiv(m, 64) * triton.cdiv(n, 64), multiprocessors(c.a.device))
    if not any(copies) or waves * whole <= BLOCK:
        return tiled_plan(c, c.a, c.b)
    columns = whole if all(copies) else k

    def copied(t: Tensor, is_copied: bool) -> Tensor:
        return copied_to(t, len(t), columns) if is_copied else t

    forms = (torch.empty(len(t), columns, dtype=t.dtype, device="meta") for t in rows)
    a, b = (form if is_copied else t for form, t, is_copied in zip(forms, rows, copies, strict=True))
    launch = tiled_plan(c, a, b.t())

    def run(a: Tensor, b: Tensor, *others: Tensor) -> None:
        launch(copied(a, copies[0]), copied(b.t(), copies[1]).t(), *others)

    return run


def tiled_plan(c: Any, a: Tensor, b: Tensor) -> Any:
    """The launch for operands in the form of a and b."""
    (m, k), n, blockwise = a.shape, b.shape[1], c.kind == "block"
    a_format, b_format = (format_of(t.dtype) for t in (a, b))
    sums = 2 if blockwise or (a_format != "int8" and not c.fast_accumulate) else 1
    config = configuration(c.a.device, sums, blockwise, bucket(m), bucket(n), bucket(k))
    decoded = INTERPRETING or (a_format != "int8" and target_sm(c.a.device) < NATIVE_FP8)
    codes = {"A_FORMAT": a_format, "B_FORMAT": b_format, "DECODED": decoded, "IMPRECISE": c.fast_accumulate}
    scales = {"BLOCKWISE": blockwise, "HAS_BIAS": c.bias is not None}
    constants = {**codes, **scales, **constants_of(config), "EVEN_K": k % config["BLOCK_K"] == 0}
    bias_step = 0 if c.bias is None else c.bias.stride(0)
    scalars = (m, n, k, *a.stride(), *b.stride(), *steps_of(c.a_scale), *steps_of(c.b_scale), bias_step)
    grid = (triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"]),)
    launch = Plan(scaled_tiled, grid, scalars, constants, config["num_warps"], config["num_stages"])

    def run(a: Tensor, b: Tensor, *others: Tensor) -> None:
        launch(a.view(torch.uint8), b.view(torch.uint8), *others)

    return run
