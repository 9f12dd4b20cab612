"""Triton kernels of products of few rows with a weight, and the plan that picks one.

y[M, N] = x[M, K] · w[N, K]ᵀ reads N·K elements of w for 2·M·N·K operations: M operations a byte in 16 bits, left of every
machine's ridge up to M = 64, so the rate at which w streams in is the limit. Each element of w is read once, 16 bytes at a
time. ``skinny_vector`` multiplies in registers (M operations and a conversion for each weight), ``skinny_tiled`` on tensor
cores, where w is the side of 64 rows or more and x the narrow one, so that padding M costs no row of w.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import SHARED_LIMIT
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import pointer_aligned
from weft.operators.launch import INTERPRETING, Plan, Plans
from weft.operators.matmul.split_sums import SplitPlan, in_parts, parts_of

# M rows of x, N rows of w, K columns of both


@triton.jit
def store_rows(y_ptr, bias_ptr, bias_col, y, m, n, M, N, part, HAS_BIAS: tl.constexpr):
    """y [rows of w, rows of x] with the bias, which one part of a split sum adds, into row-major [parts, M, N]."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n.to(tl.int64) * bias_col, mask=(n < N) & (part == 0), other=0.0).to(tl.float32)
        y += bias[:, None]
    at = y_ptr + (part.to(tl.int64) * M + m)[None, :] * N + n[:, None]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < M))


@triton.jit
def skinny_vector(
    x_ptr, w_ptr, bias_ptr, y_ptr, M, N, k_vectors, x_row, x_col, w_row, w_col, bias_col,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, VEC: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows of w and TOKENS of x. All its LANES threads walk along K, each with AT_ONCE times VEC elements
    of every row at a time, so that x is read once for all rows, sums stay in a thread's registers until the end, and threads
    meet once. K and the rows' strides are given in units of VEC, which tells the compiler that vectors do not straddle.

    Bytes are on their way either because STAGES steps go through shared memory, or because a thread asks for AT_ONCE vectors
    of each row before it multiplies the first."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    K = k_vectors * VEC
    # [ROWS, TOKENS, AT_ONCE, LANES, VEC]
    vector = tl.arange(0, AT_ONCE)[None, None, :, None, None] * LANES + tl.arange(0, LANES)[None, None, None, :, None]
    k = vector * VEC + tl.arange(0, VEC)[None, None, None, None, :]
    STEP: tl.constexpr = AT_ONCE * LANES
    steps = tl.cdiv(k_vectors, STEP)
    each = tl.cdiv(steps, SPLIT)
    first = tl.program_id(1) * each
    last = min(first + each, steps)
    start = first.to(tl.int64) * STEP * VEC
    w = w_ptr + (n % N).to(tl.int64)[:, None, None, None, None] * (w_row * VEC) + (start + k) * w_col
    x = x_ptr + (m % M).to(tl.int64)[None, :, None, None, None] * (x_row * VEC) + (start + k) * x_col
    left = K - start
    acc = tl.zeros([ROWS, TOKENS, LANES], tl.float32)
    for _ in tl.range(first, last, num_stages=STAGES):
        if EVEN_K:
            w_tile = tl.load(w, eviction_policy="evict_first")
            x_tile = tl.load(x, eviction_policy="evict_last")
        else:
            w_tile = tl.load(w, mask=k < left, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x, mask=k < left, other=0.0, eviction_policy="evict_last")
        acc += tl.sum(tl.sum(w_tile.to(tl.float32) * x_tile, axis=4), axis=2)
        w += STEP * VEC * w_col
        x += STEP * VEC * x_col
        left -= STEP * VEC
    store_rows(y_ptr, bias_ptr, bias_col, tl.sum(acc, axis=2), m, n, M, N, tl.program_id(1), HAS_BIAS)


@triton.jit
def skinny_tiled(
    x_ptr, w_ptr, bias_ptr, y_ptr, M, N, k_vectors, x_row, x_col, w_row, w_col, bias_col,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, VEC: tl.constexpr, EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_N columns of y for TOKENS rows as w · xᵀ, in slices of BLOCK_K. Rows of w past the edge wrap
    around to valid ones and are not stored; rows of x past it are not read."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    K = k_vectors * VEC
    k = tl.arange(0, BLOCK_K)
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    first = tl.program_id(1) * each
    last = min(first + each, K)
    w = w_ptr + (n % N).to(tl.int64)[:, None] * (w_row * VEC) + (first + k).to(tl.int64)[None, :] * w_col
    x = x_ptr + m.to(tl.int64)[None, :] * (x_row * VEC) + (first + k).to(tl.int64)[:, None] * x_col
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for start in range(first, last, BLOCK_K):
        if EVEN_K:
            w_tile = tl.load(w, eviction_policy="evict_first")
            x_tile = tl.load(x, mask=m[None, :] < M, other=0.0)
        else:
            w_tile = tl.load(w, mask=k[None, :] < K - start, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x, mask=(m[None, :] < M) & (k[:, None] < K - start), other=0.0)
        acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
        w += BLOCK_K * w_col
        x += BLOCK_K * x_col
    store_rows(y_ptr, bias_ptr, bias_col, acc, m, n, M, N, tl.program_id(1), HAS_BIAS)


# ---- plans -----------------------------------------------------------------------------------------------------------

FILLS = 96  # programs of four warps or more that keep a machine's memory busy: most have 84 to 170 multiprocessors
VECTOR_ROWS = 2  # of x, up to which vectors are the first choice; they can hold twice as many
ASKED = 256  # bytes of w and of x that a thread may have asked for at once, in 64 of its registers


def shared_limit(sm: int) -> int:
    return SHARED_LIMIT.get(sm, min(SHARED_LIMIT.values())) - 2048  # what the compiler keeps for itself


def heuristic(sm: int, dtype: torch.dtype, m: int, n: int, k: int) -> Config:
    """Vectors up to two rows, then tiles; sums are split where rows of w are too few to fill the machine.

    For one row a program of eight warps takes one row of w, 8 KB of it at a time, and nothing else: the hardware hands out
    the next program where one has ended, so no multiprocessor waits for another's share. An H200 took 33.8 µs for 8192 x 8192
    in bf16; 35.3 with half as much at a time, 48 with twice, 43 to 78 with several rows of w."""
    if INTERPRETING and m == 1:
        return _vector(4, 2, 1, 1, 2)
    if INTERPRETING:
        return _vector(16, 2, 1, 2) if m <= 2 * VECTOR_ROWS else _tiled(32, 64, 2, 4, 2)
    if m == 1:
        step = 8 * 32 * 16 // dtype.itemsize
        return _vector(1, max(1, FILLS // n), 8, 1, min(2, bucket(-(-k // step))))
    if m <= VECTOR_ROWS:
        rows = 8 if n >= 8192 and dtype != torch.float32 else 4
        return _vector(rows, max(1, FILLS * rows // n), 4, 3)
    if dtype == torch.float32:
        return _tiled(64, 32, _split(64, n), 4, 3)
    block_n, block_k = (64, 128) if m <= 16 else (128, 64)
    stage = (block_n + max(m, 8)) * block_k * dtype.itemsize
    return _tiled(block_n, block_k, _split(block_n, n), 4 if m <= 16 else 8, min(5, shared_limit(sm) // stage))


def _split(block_n: int, n: int) -> int:
    return max(1, 128 * block_n // n) if n < FILLS * block_n else 1


def _vector(rows: int, split: int, warps: int, stages: int, at_once: int = 1) -> Config:
    return {"ROWS": rows, "SPLIT": split, "AT_ONCE": at_once, "num_warps": warps, "num_stages": stages}


def _tiled(block_n: int, block_k: int, split: int, warps: int, stages: int) -> Config:
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT": split, "num_warps": warps, "num_stages": stages}


def candidates(sm: int, dtype: torch.dtype, m: int, n: int, k: int) -> Iterator[Config]:
    if m <= 2 * VECTOR_ROWS:
        splits = tuple(s for s in (1, 2, 4) if s == 1 or s * n <= 8192)
        for c in grid_of({"ROWS": (1, 2, 4, 8, 16), "SPLIT": splits, "num_warps": (2, 4, 8), "num_stages": (1, 3, 5)}):
            shared = (c["ROWS"] + m) * c["num_warps"] * 512 * c["num_stages"]
            if c["ROWS"] * m <= 32 and (c["num_stages"] == 1 or shared <= shared_limit(sm) // 2):
                yield {**c, "AT_ONCE": 1}
    if m <= VECTOR_ROWS:
        for c in grid_of({"ROWS": (1, 2, 4), "SPLIT": splits, "AT_ONCE": (2, 4, 8), "num_warps": (1, 2, 4, 8, 16)}):
            asked = (c["ROWS"] + m) * c["AT_ONCE"] * 16
            if asked <= ASKED and c["AT_ONCE"] * c["num_warps"] * 512 <= k * dtype.itemsize:
                yield {**c, "num_stages": 1}
    splits = tuple(s for s in (1, 2, 4, 8) if s == 1 or s * n <= 32768)
    block_k = tuple(elements * 2 // dtype.itemsize for elements in (64, 128, 256))
    choices = {"BLOCK_N": (32, 64, 128, 256), "BLOCK_K": block_k, "SPLIT": splits}
    for c in grid_of({**choices, "num_warps": (4, 8), "num_stages": (3, 5)}):
        stage = (c["BLOCK_N"] + max(m, 8)) * c["BLOCK_K"] * dtype.itemsize
        if c["BLOCK_N"] >= 8 * c["num_warps"] and stage >= 8192 and stage * c["num_stages"] <= shared_limit(sm):
            yield c


configuration = Configurations(__file__, "skinny_matmul", heuristic, candidates)


def vector_length(*tensors: Tensor) -> int:
    """Elements of up to 16 bytes that rows of all tensors can be cut into: 1 where they are not contiguous."""
    length = 16 // tensors[0].element_size()
    for t in tensors:
        if t.stride(1) != 1:
            return 1
        while t.shape[1] % length or t.stride(0) % length:
            length //= 2
    return length if pointer_aligned(*tensors) else 1


def plan(x: Tensor, w: Tensor, bias: Tensor | None) -> Plan | SplitPlan:
    """Of ``(x, w, bias, y)`` into a new row-major y [M, N] of x's dtype; without a bias, w takes its place."""
    (m, k), n = x.shape, w.shape[0]
    config = configuration(x.device, x.dtype, min(bucket(m), 64), bucket(n), bucket(k))
    vec = vector_length(x, w)
    constants: dict[str, Any]
    scalars = (
        m,
        n,
        k // vec,
        x.stride(0) // vec,
        x.stride(1),
        w.stride(0) // vec,
        w.stride(1),
        0 if bias is None else bias.stride(0),
    )
    if "ROWS" in config:
        tokens, rows, lanes = min(bucket(m), 2 * VECTOR_ROWS), config["ROWS"], config["num_warps"] * 32
        at_once = config["AT_ONCE"]
        step = at_once * lanes * vec
        split = parts_of(config["SPLIT"], triton.cdiv(k, step))
        tile = {"ROWS": rows, "TOKENS": tokens, "LANES": lanes, "AT_ONCE": at_once, "VEC": vec, "EVEN_K": k % step == 0}
        constants = {**tile, "HAS_BIAS": bias is not None, "SPLIT": split, "STAGES": config["num_stages"]}
        kernel, stages = skinny_vector, 1
    else:
        tokens, rows, step = min(max(bucket(m), 8), 64), config["BLOCK_N"], config["BLOCK_K"]
        split = parts_of(config["SPLIT"], triton.cdiv(k, step))
        tile = {"BLOCK_N": rows, "TOKENS": tokens, "BLOCK_K": step, "VEC": vec, "EVEN_K": k % step == 0}
        constants = {**tile, "HAS_BIAS": bias is not None, "SPLIT": split}
        kernel, stages = skinny_tiled, config["num_stages"]
    grid = (triton.cdiv(n, rows), split, triton.cdiv(m, tokens))
    return in_parts(Plan(kernel, grid, scalars, constants, config["num_warps"], stages), split, m * n)


plans = Plans(plan)
