"""The Triton kernel of matrix products and of batches of them, and the launch that picks its tile.

A tile of BLOCK_M × BLOCK_N reads BLOCK_K-deep slices of A and B, so each element of A is read N / BLOCK_N times and of B
M / BLOCK_M times, mostly from L2: programs are ordered in groups of GROUP tile rows, so that those that run together share
slices. Where there are few tiles and many terms, each tile's sum is split over SPLIT programs, whose fp32 parts a second kernel
adds.
"""

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, constants_of, grid_of
from weft.operators.cuda import shared_limit
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.partial_sums import SplitPlan, in_parts, parts_of

LEVELS = 3  # batch dimensions that the kernel steps through
LEAST_STEPS = 8  # of BLOCK_K terms that a part of a split sum has


@triton.jit
def round_to_tf32(x):
    """The nearest of the values with 10 bits of mantissa: tensor cores cut off the other 13 bits, which doubles the error."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)  # NaN and infinities stay as they are


@triton.jit
def in_bands(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """A program's tile row and column: in bands of GROUP tile rows, column by column, so that programs that run together share
    slices of both operands in L2."""
    in_band = GROUP * tiles_n
    first = program // in_band * GROUP
    height = min(tiles_m - first, GROUP)
    return first + program % in_band % height, program % in_band // height


@triton.jit
def tile_of(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The rows and columns of a program's tile."""
    m, n = in_bands(program, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    return m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def matmul_tiled(
    a_ptr, b_ptr, c_ptr, M, N, K, middle, inner, a_outer, a_middle, a_inner, b_outer, b_middle, b_inner,
    a_row, a_col, b_row, b_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program computes one BLOCK_M × BLOCK_N tile of C[z] = A[z]·B[z], z = (outer · middle + i) · inner + j, accumulated in
    fp32, into a contiguous C [matrices, M, N]. Any strides: the layout (NN, NT, TN, TT) is in them, and those of batch
    dimensions are 0 where an operand is broadcast. EVEN_K: K is a multiple of BLOCK_K, so loads need no mask. FILLED: every
    program has terms to add. Rows and columns past the edge wrap around to valid ones and are not stored. With a SPLIT,
    program (·, p) sums the p-th part of K, and C is [SPLIT, matrices, M, N]."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    matrix = tl.program_id(0) // (tiles_m * tiles_n)
    m, n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), M, N, BLOCK_M, BLOCK_N, GROUP)
    at_outer = (matrix // (middle * inner)).to(tl.int64)
    at_middle = (matrix // inner % middle).to(tl.int64)
    at_inner = (matrix % inner).to(tl.int64)
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
    c += m.to(tl.int64)[:, None] * N + n.to(tl.int64)[None, :]
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def heuristic(
    sm: int, dtype: torch.dtype, layout: str, precision: str, even: bool, matrices: int, m: int, n: int, k: int
) -> Config:
    """Large tiles where all matrices together fill the machine with them, and none larger than a matrix. Rows that are not
    ``even`` are loaded through registers, of which 128 × 256 tiles have none left."""
    if INTERPRETING:
        return tile(32, 64, 32, 4, 2)
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
    return tile(rows, columns, deep, warps, stages)


def tile(m: int, n: int, k: int, warps: int, stages: int, group: int = 8) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": group, "num_warps": warps, "num_stages": stages}


def large_tiles(sm: int, dtype: torch.dtype) -> Iterable[Config]:
    """Configurations worth measuring where there are enough tiles to fill the machine."""
    size, sizes = dtype.itemsize, (64, 128, 256)
    deep = (16, 32, 64) if size == 4 else (32, 64, 128)
    tiles = {"BLOCK_M": sizes, "BLOCK_N": sizes, "BLOCK_K": deep, "GROUP": (8,)}
    for c in grid_of({**tiles, "num_warps": (4, 8), "num_stages": (3, 4)}):
        per_thread = c["BLOCK_M"] * c["BLOCK_N"] // (c["num_warps"] * 32)  # fp32 accumulators in registers
        shared = (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * size * c["num_stages"]
        if 32 <= per_thread <= 128 and 32 * 1024 < shared <= shared_limit(sm):
            yield c


def candidates(
    sm: int, dtype: torch.dtype, layout: str, precision: str, even: bool, matrices: int, m: int, n: int, k: int
) -> Iterable[Config]:
    yield from large_tiles(sm, dtype)
    small = {"BLOCK_M": (16, 32, 64, 128), "BLOCK_N": (16, 32, 64, 128), "BLOCK_K": (32, 64), "num_warps": (1, 2, 4)}
    for c in grid_of(small):
        per_thread = c["BLOCK_M"] * c["BLOCK_N"] // (c["num_warps"] * 32)
        if min(m, n) <= 128 and c["BLOCK_M"] <= max(m, 16) and c["BLOCK_N"] <= max(n, 16) and 8 <= per_thread <= 64:
            yield {**c, "GROUP": 8, "num_stages": 2}


configuration = Configurations(__file__, "matmul", heuristic, candidates)


def layout_of(a: Tensor, b: Tensor) -> str:
    """NN, NT, TN or TT: whether each operand is row-major (N) or column-major (T)."""
    return "".join("N" if t.stride(-1) == 1 or t.stride(-2) > t.stride(-1) else "T" for t in (a, b))


def plan(a: Tensor, b: Tensor, precision: str) -> Plan | SplitPlan:
    """The launch of C = A·B for a [*batch, M, K] and b [*batch, K, N] with at most LEVELS batch dimensions, into a new
    contiguous C. Call it with (a, b, c).

    Tiles that do not fill the machine split their sums. A sum of very many terms becomes more exact too: tensor cores cut off
    what does not fit into the accumulator, an error that grows with the number of steps.

    Raises:
        Declined: more tiles than a grid has programs.
    """
    (m, k), n, missing = a.shape[-2:], b.shape[-1], LEVELS + 2 - a.ndim
    sizes, matrices = (*(1,) * missing, *a.shape[:-2]), math.prod(a.shape[:-2])
    steps = [(*(0,) * missing, *t.stride()[:-2]) for t in (a, b)]
    even = all(step == 1 or step % 16 == 0 for t in (a, b) for step in t.stride())  # what Triton looks at
    sizes_key = (bucket(matrices), bucket(m), bucket(n), bucket(k))
    config = configuration(a.device, a.dtype, layout_of(a, b), precision, even, *sizes_key)
    blocks = constants_of(config)
    tiles = triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"]) * matrices
    if tiles >= 2**31:
        raise Declined(f"{tiles} tiles, more than a grid has programs")
    slices = triton.cdiv(k, blocks["BLOCK_K"])
    split = parts_of(min(multiprocessors(a.device) // max(tiles, 1), slices // LEAST_STEPS), slices)
    scalars = (m, n, k, *sizes[1:], *steps[0], *steps[1], *a.stride()[-2:], *b.stride()[-2:])
    known = {"EVEN_K": k % blocks["BLOCK_K"] == 0, "FILLED": k > 0, "PRECISION": precision, "SPLIT": split}
    constants, options = {**blocks, **known}, (config["num_warps"], config["num_stages"])
    return in_parts(Plan(matmul_tiled, (tiles, split), scalars, constants, *options), split, matrices * m * n)
