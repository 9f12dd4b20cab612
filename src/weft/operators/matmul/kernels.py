"""The tiled Triton kernel for matrix products, and the plan that picks its tile.

C[M, N] = A[M, K] · B[K, N] does 2·M·N·K operations on (M·K + K·N + M·N) elements. A tile of BLOCK_M × BLOCK_N reads
BLOCK_K-deep slices of A and B, so each element of A is read N / BLOCK_N times and of B M / BLOCK_M times, mostly from L2:
programs are ordered in groups of GROUP tile rows, so that those that run together share slices. Where there are few tiles and
many terms, each tile's sum is split over SPLIT programs, whose fp32 parts a second kernel adds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, Plans, multiprocessors
from weft.operators.matmul import descriptor_kernels
from weft.operators.matmul.descriptor_kernels import place_of
from weft.operators.matmul.split_sums import SplitPlan, in_parts, parts_of

PRECISIONS = ("ieee", "tf32", "tf32x3")


@triton.jit
def round_to_tf32(x):
    """The nearest of the values with 10 bits of mantissa: tensor cores cut off the other 13 bits, which doubles the error."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)  # NaN and infinities stay as they are


@triton.jit
def matmul_tiled(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_col, b_row, b_col, c_row, c_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program computes one BLOCK_M × BLOCK_N tile of C, accumulated in fp32. Any strides: the layout (NN, NT, TN, TT)
    is in them. EVEN_K: K is a multiple of BLOCK_K, so loads need no mask. FILLED: every program has terms to add. Rows and
    columns past the edge wrap around to valid ones and are not stored. With a SPLIT, program (tile, p) sums the p-th part of
    K, and C is [SPLIT, M, N]."""
    m, n = place_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m += tl.arange(0, BLOCK_M)
    n += tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a = a_ptr + (m % M).to(tl.int64)[:, None] * a_row + k.to(tl.int64)[None, :] * a_col  # [BLOCK_M, BLOCK_K]
    b = b_ptr + k.to(tl.int64)[:, None] * b_row + (n % N).to(tl.int64)[None, :] * b_col  # [BLOCK_K, BLOCK_N]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first, last = 0, K
    if SPLIT > 1:
        part = tl.program_id(1).to(tl.int64)
        length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
        first = (part * length).to(K.dtype)
        last = min(first + length, K)
        a += part * length * a_col
        b += part * length * b_row
        c_ptr += part * M * N
    if FILLED:  # no path leads around the loop: with one, ptxas may let no wgmma run beside another (its remark C7515)
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
    c = c_ptr + m.to(tl.int64)[:, None] * c_row + n.to(tl.int64)[None, :] * c_col
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def heuristic(sm: int, dtype: torch.dtype, layout: str, precision: str, m: int, n: int, k: int) -> Config:
    """Large tiles where there are enough of them to fill the machine; three stages, two where shared memory is 99 KiB."""
    if INTERPRETING:
        return _config(32, 64, 32, 1, 4, 2)
    if dtype == torch.float32:
        return _config(64, 64, 32, 8, 4, 3) if precision == "ieee" else _config(128, 128, 32, 8, 8, 3)
    if min(m, n) <= 64:
        return _config(64, 64, 64, 8, 4, 3)
    if m * n <= 1024 * 1024:
        return _config(64, 128, 64, 8, 4, 3)
    if sm in (90, 100):
        return _config(128, 256, 64, 8, 8, 3)
    return _config(128, 128, 32 if sm in (86, 89, 120) else 64, 8, 8, 3)


def _config(m: int, n: int, k: int, group: int, warps: int, stages: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": group, "num_warps": warps, "num_stages": stages}


def candidates(sm: int, dtype: torch.dtype, layout: str, precision: str, m: int, n: int, k: int) -> Any:
    size = dtype.itemsize
    limit = 232448 if sm in (90, 100) else 101376 if sm in (86, 89, 120) else 166912
    choices = {
        "BLOCK_M": (64, 128, 256),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (16, 32, 64) if size == 4 else (32, 64, 128),
        "GROUP": (8,),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    }
    for c in grid_of(choices):
        per_thread = c["BLOCK_M"] * c["BLOCK_N"] // (c["num_warps"] * 32)  # fp32 accumulators in registers
        shared = (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * size * c["num_stages"]
        if 32 <= per_thread <= 128 and shared <= limit and shared > 32 * 1024:
            yield c


configuration = Configurations(__file__, "matmul", heuristic, candidates)


def layout_of(a: Tensor, b: Tensor) -> str:
    """NN, NT, TN or TT: whether each operand is row-major (N) or column-major (T)."""
    return "".join("N" if t.stride(1) == 1 or t.stride(0) > t.stride(1) else "T" for t in (a, b))


LEAST_STEPS = 8  # of BLOCK_K terms that a part of a split sum has


def split_of(tiles: int, steps: int, device: torch.device) -> int:
    """Into how many parts the sums of ``tiles`` tiles, of ``steps`` slices of K each, are split: as fill the machine."""
    return parts_of(min(multiprocessors(device) // max(tiles, 1), steps // LEAST_STEPS), steps)


def plan(a: Tensor, b: Tensor, precision: str, dtype: torch.dtype | None = None) -> Plan | SplitPlan:
    """The launch of C = A·B into a new row-major C [M, N] of a's dtype, or of ``dtype``.

    Tiles that do not fill the machine split their sums. A sum of very many terms becomes more exact too: tensor cores cut
    off what does not fit into the accumulator, an error that grows with the number of steps. Where nothing is split and TMA
    takes the operands (and a tile of C has room beside them: not in fp32), it fetches them.
    """
    (m, k), n = a.shape, b.shape[1]
    config = configuration(a.device, a.dtype, layout_of(a, b), precision, bucket(m), bucket(n), bucket(k))
    tile = {name: config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP")}
    tiles = triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"])
    split = split_of(tiles, triton.cdiv(k, tile["BLOCK_K"]), a.device)
    if split == 1 and dtype in (None, a.dtype) and descriptor_kernels.fits(a, b):
        return descriptor_kernels.plan(a, b)
    products = Plan(
        matmul_tiled,
        (tiles, split),
        (m, n, k, *a.stride(), *b.stride(), n, 1),
        {**tile, "EVEN_K": k % tile["BLOCK_K"] == 0, "FILLED": k > 0, "PRECISION": precision, "SPLIT": split},
        config["num_warps"],
        config["num_stages"],
    )
    return in_parts(products, split, m * n)


plans = Plans(plan)
