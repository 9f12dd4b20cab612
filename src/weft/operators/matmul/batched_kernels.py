"""The Triton kernel of products of many matrices, and the plan that picks its tile.

A program computes one tile of one matrix; programs of a matrix follow one another, so that those which run together share it in
L2. Batch dimensions are stepped through by their strides, 0 of what is broadcast: nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, Plans
from weft.operators.matmul import kernels
from weft.operators.matmul.batched_views import forms
from weft.operators.matmul.kernels import round_to_tf32
from weft.operators.matmul.split_sums import SplitPlan, in_parts

LEVELS = 3  # batch dimensions that the kernel steps through


@triton.jit
def batched_tiled(
    a_ptr, b_ptr, c_ptr, M, N, K, middle, inner, a_outer, a_middle, a_inner, b_outer, b_middle, b_inner,
    a_row, a_col, b_row, b_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program computes one BLOCK_M × BLOCK_N tile of C[z] = A[z]·B[z], z = (outer · middle + i) · inner + j, accumulated in
    fp32, into a contiguous C [matrices, M, N]. Rows and columns past the edge wrap around and are not stored. With a SPLIT,
    program (·, p) sums the p-th part of K, and C is [SPLIT, matrices, M, N]."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    matrix = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m = first + tile % in_group % height
    tile_n = tile % in_group // height

    at_outer = (matrix // (middle * inner)).to(tl.int64)
    at_middle = (matrix // inner % middle).to(tl.int64)
    at_inner = (matrix % inner).to(tl.int64)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a = a_ptr + at_outer * a_outer + at_middle * a_middle + at_inner * a_inner
    b = b_ptr + at_outer * b_outer + at_middle * b_middle + at_inner * b_inner
    a += (m % M).to(tl.int64)[:, None] * a_row + k.to(tl.int64)[None, :] * a_col  # [BLOCK_M, BLOCK_K]
    b += k.to(tl.int64)[:, None] * b_row + (n % N).to(tl.int64)[None, :] * b_col  # [BLOCK_K, BLOCK_N]
    c = c_ptr + matrix.to(tl.int64) * M * N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first, last = 0, K
    if SPLIT > 1:
        part = tl.program_id(1).to(tl.int64)
        length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
        first = (part * length).to(K.dtype)
        last = min(first + length, K)
        a += part * length * a_col
        b += part * length * b_row
        c += part * (tl.num_programs(0) // (tiles_m * tiles_n)) * M * N
    if FILLED:  # as in matmul_tiled
        tl.assume(first < last)
    for start in range(first, last, BLOCK_K):
        if EVEN_K:
            a_tile, b_tile = tl.load(a), tl.load(b)
        else:
            a_tile = tl.load(a, mask=k[None, :] < K - start, other=0.0)
            b_tile = tl.load(b, mask=k[:, None] < K - start, other=0.0)
        if PRECISION == "tf32" and a_ptr.dtype.element_ty == tl.float32:
            a_tile, b_tile = round_to_tf32(a_tile), round_to_tf32(b_tile)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        a += BLOCK_K * a_col
        b += BLOCK_K * b_row
    c += m.to(tl.int64)[:, None] * N + n.to(tl.int64)[None, :]
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def heuristic(
    sm: int, dtype: torch.dtype, layout: str, precision: str, even: bool, matrices: int, m: int, n: int, k: int
) -> Config:
    """Large tiles where all matrices together fill the machine with them, and none larger than a matrix. Rows that are not
    ``even`` are loaded through registers, of which 128 × 256 tiles have none left."""
    if INTERPRETING:
        return _config(32, 64, 32, 4, 2)
    if dtype == torch.float32:
        columns, deep = 64 if precision == "ieee" else 128, 32
        rows, stages = columns, 3
    elif min(m, n) <= 64 or m * n * matrices <= 1024 * 1024:
        rows, columns, deep, stages = 64, 128, 64, 3
    elif sm in (90, 100) and even:
        rows, columns, deep, stages = 128, 256, 64, 3
    else:
        rows, columns, deep, stages = 128, 128, 32 if sm in (86, 89, 120) else 64, 3
    rows, columns, deep = (max(16, min(most, size)) for most, size in ((rows, m), (columns, n), (deep, k)))
    warps = 8 if rows * columns > 128 * 64 else 4 if rows * columns > 32 * 32 else 1
    return _config(rows, columns, deep, warps, stages)


def _config(m: int, n: int, k: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 8, "num_warps": warps, "num_stages": stages}


def candidates(
    sm: int, dtype: torch.dtype, layout: str, precision: str, even: bool, matrices: int, m: int, n: int, k: int
) -> Iterable[Config]:
    yield from kernels.candidates(sm, dtype, layout, precision, m, n, k)
    small = {"BLOCK_M": (16, 32, 64, 128), "BLOCK_N": (16, 32, 64, 128), "BLOCK_K": (32, 64), "num_warps": (1, 2, 4)}
    for c in grid_of(small):
        per_thread = c["BLOCK_M"] * c["BLOCK_N"] // (c["num_warps"] * 32)
        if min(m, n) <= 128 and c["BLOCK_M"] <= max(m, 16) and c["BLOCK_N"] <= max(n, 16) and 8 <= per_thread <= 64:
            yield {**c, "GROUP": 8, "num_stages": 2}


configuration = Configurations(__file__, "batched_matmul", heuristic, candidates)


def layout_of(a: Tensor, b: Tensor) -> str:
    """NN, NT, TN or TT: whether each operand is row-major (N) or column-major (T)."""
    return "".join("N" if t.stride(-1) == 1 or t.stride(-2) > t.stride(-1) else "T" for t in (a, b))


def why_not(a: Tensor, b: Tensor) -> str:
    """Why the kernel does not take a [..., M, K] and b [..., K, N] (an empty string when it does)."""
    levels = forms(a, b)[0].ndim - 2
    if levels > LEVELS:
        return f"{levels} batch dimensions that do not merge into {LEVELS}, so a copy would be needed"
    return ""


def many_small(a: Tensor, b: Tensor) -> bool:
    """Whether there are a thousand products or more of matrices no larger than 64 × 64, for which this kernel is the fastest
    (1.4 times cuBLAS at 4096 × 64³ in bf16)."""
    if why_not(a, b):
        return False
    a, b = forms(a, b)
    return a.ndim > 2 and math.prod(a.shape[:-2]) >= 1024 and max(*a.shape[-2:], b.shape[-1]) <= 64


def plan(a: Tensor, b: Tensor, precision: str, dtype: torch.dtype | None = None) -> Plan | SplitPlan:
    """The launch of C = A·B for a [..., M, K] and b [..., K, N] into a new contiguous C of a's dtype, or of
    ``dtype``, which goes with the tensor. Call it with (a, b, c).

    Raises:
        Declined: batch dimensions that do not merge into three, or more tiles than a grid has programs.
    """
    if reason := why_not(a, b):
        raise Declined(reason)
    a, b = forms(a, b)
    (m, k), n, missing = a.shape[-2:], b.shape[-1], LEVELS + 2 - a.ndim
    sizes = (*(1,) * missing, *a.shape[:-2])
    matrices = sizes[0] * sizes[1] * sizes[2]
    if missing == LEVELS:
        return kernels.plan(a, b, precision, dtype)
    steps = [(*(0,) * missing, *t.stride()[:-2]) for t in (a, b)]
    sizes_key = (bucket(matrices), bucket(m), bucket(n), bucket(k))
    even = all(step == 1 or step % 16 == 0 for t in (a, b) for step in t.stride())  # what Triton looks at
    config = configuration(a.device, a.dtype, layout_of(a, b), precision, even, *sizes_key)
    tile = {name: config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP")}
    tiles = triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]) * matrices
    if tiles >= 2**31:
        raise Declined(f"{tiles} tiles, more than a grid has programs")
    split = kernels.split_of(tiles, triton.cdiv(k, tile["BLOCK_K"]), a.device)
    products = Plan(
        batched_tiled,
        (tiles, split),
        (m, n, k, *sizes[1:], *steps[0], *steps[1], *a.stride()[-2:], *b.stride()[-2:]),
        {**tile, "EVEN_K": k % tile["BLOCK_K"] == 0, "FILLED": k > 0, "PRECISION": precision, "SPLIT": split},
        config["num_warps"],
        config["num_stages"],
    )
    return in_parts(products, split, matrices * m * n)


plans = Plans(plan)
