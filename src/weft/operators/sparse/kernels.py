"""Triton kernels of y = A·x and Y = A·B for a CSR A [M, N] and a dense x [N] or B [N, K]: a group of lanes for each row
(row-split), or equal parts of rows and elements (merge).

Both read values and column indices once, as a stream that need not stay in the L1 cache, and gather x or rows of B, which
should. Every stored element gathers a whole line of B, of which a program takes BLOCK columns, but a single element of x.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, tiles
from weft.operators.launch import INTERPRETING, Plan, Plans, multiprocessors
from weft.operators.sparse.balance import WIDEST, partition, row_width
from weft.operators.sparse.csr import CSR

ITEMS = 64 if INTERPRETING else 512  # rows and elements of a merge part of A·B

COLUMNS = 128  # of B, that a program takes at most

# Elements: a merge part's tile begins at a multiple, so that its loads are wide and its head bits whole words.
ALIGNED = 32

# Steps whose products are added up before they join the sum: thousands added one by one would err several times as much.
STEPS = tl.constexpr(32)


@triton.jit
def row_split(offsets_ptr, columns_ptr, values_ptr, x_ptr, y_ptr, M, x_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """y[m] = the sum over row m, of ROWS rows side by side, WIDTH elements of each at a time."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = tl.load(offsets_ptr + m, mask=m < M, other=0)
    length = tl.load(offsets_ptr + m + 1, mask=m < M, other=0) - begin
    longest = tl.max(length, axis=0)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, longest, STEPS * WIDTH):
        part = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in range(first, tl.minimum(first + STEPS * WIDTH, longest), WIDTH):
            k = start + tl.arange(0, WIDTH)
            there = k[None, :] < length[:, None]
            at = begin[:, None] + k[None, :]
            column = tl.load(columns_ptr + at, mask=there, other=0, eviction_policy="evict_first").to(tl.int64)
            value = tl.load(values_ptr + at, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x = tl.load(x_ptr + column * x_stride, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
            part += value * x
        total += part
    tl.store(y_ptr + m, tl.sum(total, axis=1).to(y_ptr.dtype.element_ty), mask=m < M)


@triton.jit
def add_within_rows(sum_a, begins_a, sum_b, begins_b):
    """The join of a segmented sum: b's stands alone where a row begins in it."""
    return tl.where(begins_b != 0, sum_b, sum_a + sum_b), begins_a | begins_b


@triton.jit
def merge_parts(
    offsets_ptr, columns_ptr, values_ptr, x_ptr, rows_ptr, heads_ptr, y_ptr, open_ptr, closed_ptr, PATH, Z, x_stride,
    ITEMS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Part p of the merge path (of PATH = M + Z): at most ITEMS elements, whose products one segmented scan over a tile sums
    within rows. Rows that begin and end here go to y; the row that began before and ends here leaves its sum in closed[p]; the
    row that is open at the part's end leaves its in open[p]."""
    p = tl.program_id(0).to(tl.int64)
    first_row = tl.load(rows_ptr + p).to(tl.int64)
    last_row = tl.load(rows_ptr + p + 1).to(tl.int64)
    begin = p * ITEMS - first_row
    end = tl.minimum((p + 1) * ITEMS, PATH) - last_row
    base = begin // 32 * 32
    columns_ptr += base
    values_ptr += base
    k = tl.arange(0, TILE)
    first, upto = (begin - base).to(tl.int32), (end - base).to(tl.int32)
    wide = (upto + 31) // 32 * 32
    blocks = k < wide  # changes every 32 elements, so loads stay wide (made out here: in the branch Triton loses that)
    if base + wide <= Z:
        column = tl.load(columns_ptr + k, mask=blocks, other=0, eviction_policy="evict_first")
        value = tl.load(values_ptr + k, mask=blocks, other=0.0, eviction_policy="evict_first")
    else:
        column = tl.load(columns_ptr + k, mask=k < upto, other=0, eviction_policy="evict_first")
        value = tl.load(values_ptr + k, mask=k < upto, other=0.0, eviction_policy="evict_first")
    here = (k >= first) & (k < upto)
    x = tl.load(x_ptr + column.to(tl.int64) * x_stride, mask=here, other=0.0, eviction_policy="evict_last")
    product = tl.where(here, value.to(tl.float32) * x.to(tl.float32), 0.0)
    word = tl.load(heads_ptr + base // 32 + (k >> 5), mask=blocks, other=0)
    begins = (word >> (k & 31)) & 1
    sums, _ = tl.associative_scan((product, begins), 0, add_within_rows)

    for start in range(first_row, last_row + 1, ROWS):
        row = start + tl.arange(0, ROWS)
        row_begin = tl.load(offsets_ptr + row, mask=row <= last_row, other=0).to(tl.int64)
        row_end = tl.load(offsets_ptr + row + 1, mask=row < last_row, other=0).to(tl.int64)
        row_end = tl.where(row < last_row, row_end, end)  # the open row ends with the part
        last = tl.minimum(tl.maximum(row_end - 1 - base, 0), TILE - 1).to(tl.int32)
        total = tl.gather(sums, last, 0)
        total = tl.where(row_end > tl.maximum(row_begin, begin), total, 0.0)
        whole = (row < last_row) & (row_begin >= begin)
        tl.store(y_ptr + row, total.to(y_ptr.dtype.element_ty), mask=whole)
        tl.store(closed_ptr + p + row * 0, total, mask=(row < last_row) & (row_begin < begin))
        tl.store(open_ptr + p + row * 0, total, mask=row == last_row)


@triton.jit
def add_open(rows_ptr, runs_ptr, open_ptr, closed_ptr, y_ptr, PARTS, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows that cuts split: y = the sums that parts p … p + runs[p] - 1 left open, in their order, and what closed it."""
    p = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    run = tl.load(runs_ptr + p, mask=p < PARTS, other=0)
    k = tl.arange(0, WIDTH)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, tl.max(run, axis=0), WIDTH):
        there = start + k[None, :] < run[:, None]
        total += tl.load(open_ptr + p[:, None] + start + k[None, :], mask=there, other=0.0)
    split = run > 0
    row = tl.load(rows_ptr + p + 1, mask=split, other=0)
    closed = tl.load(closed_ptr + p + run, mask=split, other=0.0)
    y = tl.sum(total, axis=1) + closed
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=split)


# ---- times a dense matrix --------------------------------------------------------------------------------------------


@triton.jit
def rows_times_dense(
    offsets_ptr, columns_ptr, values_ptr, b_ptr, y_ptr, M, K, b_row, b_col, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """y[m, :] = the sum over row m, of ROWS rows side by side, one element of each at a time."""
    blocks = tl.cdiv(K, BLOCK)
    m = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    begin = tl.load(offsets_ptr + m, mask=m < M, other=0)
    length = tl.load(offsets_ptr + m + 1, mask=m < M, other=0) - begin
    longest = tl.max(length, axis=0)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, longest, STEPS):
        part = tl.zeros([ROWS, BLOCK], tl.float32)
        upto = tl.minimum(first + STEPS, longest)
        for step in tl.range(first, upto, loop_unroll_factor=4):  # several rows of B on their way
            there = step < length
            column = tl.load(columns_ptr + begin + step, mask=there, other=0).to(tl.int64)
            value = tl.load(values_ptr + begin + step, mask=there, other=0.0).to(tl.float32)
            at = b_ptr + column[:, None] * b_row + k[None, :] * b_col
            inside = there[:, None] & (k[None, :] < K)
            b = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            part += value[:, None] * b
        total += part
    at = y_ptr + m[:, None] * K + k[None, :]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(m[:, None] < M) & (k[None, :] < K))


@triton.jit
def parts_times_dense(
    offsets_ptr, columns_ptr, values_ptr, b_ptr, rows_ptr, y_ptr, open_ptr, closed_ptr, PATH, K, b_row, b_col,
    ITEMS: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Part p of the merge path (of PATH = M + Z), row by row, REACH elements at a time. Rows that begin and end here go to y,
    the others to open[p, :] and closed[p, :] as in spmv's ``merge_parts``."""
    blocks = tl.cdiv(K, BLOCK)
    p = (tl.program_id(0) // blocks).to(tl.int64)
    k = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    first_row = tl.load(rows_ptr + p).to(tl.int64)
    last_row = tl.load(rows_ptr + p + 1).to(tl.int64)
    begin = p * ITEMS - first_row
    end = tl.minimum((p + 1) * ITEMS, PATH) - last_row
    for row in range(first_row, last_row + 1):
        row_begin = tl.load(offsets_ptr + row).to(tl.int64)
        row_end = tl.load(offsets_ptr + row + 1, mask=row < last_row, other=0).to(tl.int64)
        row_end = tl.where(row < last_row, row_end, end)  # the open row ends with the part
        first = tl.maximum(row_begin, begin)
        total = tl.zeros([REACH, BLOCK], tl.float32)
        for start in range(0, (row_end - first).to(tl.int32), REACH):
            z = first + start + tl.arange(0, REACH)
            column = tl.load(columns_ptr + z, mask=z < row_end, other=0).to(tl.int64)
            value = tl.load(values_ptr + z, mask=z < row_end, other=0.0).to(tl.float32)
            at = b_ptr + column[:, None] * b_row + k[None, :] * b_col
            inside = (z[:, None] < row_end) & (k[None, :] < K)
            b = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            total += value[:, None] * b
        y = tl.sum(total, axis=0)
        closes = row < last_row
        tl.store(y_ptr + row * K + k, y.to(y_ptr.dtype.element_ty), mask=(k < K) & closes & (row_begin >= begin))
        tl.store(closed_ptr + p * K + k, y, mask=(k < K) & closes & (row_begin < begin))
        tl.store(open_ptr + p * K + k, y, mask=(k < K) & (row == last_row))


@triton.jit
def add_open_rows(rows_ptr, runs_ptr, open_ptr, closed_ptr, y_ptr, K, REACH: tl.constexpr, BLOCK: tl.constexpr):
    """A row that cuts split: y[row, :] = the sums that parts p … p + runs[p] - 1 left open, and what closed it."""
    blocks = tl.cdiv(K, BLOCK)
    p = (tl.program_id(0) // blocks).to(tl.int64)
    k = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    run = tl.load(runs_ptr + p)
    if run > 0:
        total = tl.zeros([REACH, BLOCK], tl.float32)
        for start in range(0, run, REACH):
            part = start + tl.arange(0, REACH)
            inside = (part[:, None] < run) & (k[None, :] < K)
            total += tl.load(open_ptr + (p + part)[:, None] * K + k[None, :], mask=inside, other=0.0)
        y = tl.sum(total, axis=0) + tl.load(closed_ptr + (p + run) * K + k, mask=k < K, other=0.0)
        row = tl.load(rows_ptr + p + 1).to(tl.int64)
        tl.store(y_ptr + row * K + k, y.to(y_ptr.dtype.element_ty), mask=k < K)


row_tiles = tiles({"TILE": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8)}, 4, 64)
part_tiles = tiles({"TILE": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)}, 4, 32)
# 8 elements a thread: so many gathers are on their way at once
vector_rows = Configurations(__file__, "row_split", {"TILE": 1024, "num_warps": 4}, row_tiles)
vector_parts = Configurations(__file__, "merge", {"TILE": 2048, "num_warps": 4}, part_tiles)


def rows_heuristic(sm: int, dtype: torch.dtype, k: int) -> Config:
    """8 sums a thread; four rows of B are on their way to each."""
    return {"ROWS": max(1024 // min(k, COLUMNS), 1), "BLOCK": min(k, COLUMNS), "num_warps": 4}


def rows_candidates(sm: int, dtype: torch.dtype, k: int) -> Any:
    blocks = [b for b in (32, 64, 128, 256, 512) if b <= k] or [k]
    choices = {"ROWS": (1, 2, 4, 8, 16, 32, 64), "BLOCK": blocks, "num_warps": (1, 2, 4, 8)}
    return tiles(choices, 2, 16, of=("ROWS", "BLOCK"))


def parts_heuristic(sm: int, dtype: torch.dtype, k: int) -> Config:
    """One warp a part, 8 elements at a time: the sum over them stays within a thread where K fills a warp."""
    return {"REACH": 8, "BLOCK": min(k, COLUMNS), "num_warps": 1}


def parts_candidates(sm: int, dtype: torch.dtype, k: int) -> Any:
    blocks = [b for b in (32, 64, 128, 256, 512) if b <= k] or [k]
    return tiles({"REACH": (2, 4, 8, 16, 32), "BLOCK": blocks, "num_warps": (1, 2, 4)}, 4, 64, of=("REACH", "BLOCK"))


dense_rows = Configurations(__file__, "rows_times_dense", rows_heuristic, rows_candidates)
dense_parts = Configurations(__file__, "parts_times_dense", parts_heuristic, parts_candidates)


# ---- plans: b is x [N] or B [N, K] -----------------------------------------------------------------------------------


def merge_tile(values: Tensor) -> int:
    """Elements of a part's tile; small in the interpreter, which calls a scan's function once an element."""
    tile = vector_parts(values.device, values.dtype)["TILE"]
    return 128 if INTERPRETING else tile


def merge_items(values: Tensor) -> int:
    """Rows and elements of a part: what a tile holds wherever it begins."""
    return merge_tile(values) - ALIGNED


@Plans
def row_plans(offsets: Tensor, columns: Tensor, values: Tensor, b: Tensor) -> Plan:
    """Of ``(offsets, columns, values, b, y)``."""
    m = len(offsets) - 1
    if b.ndim == 1:
        width = row_width(m, len(values))
        config = vector_rows(values.device, values.dtype, width)
        rows = max(min(config["TILE"], 256 if INTERPRETING else WIDEST * 128) // width, 1)
        tile, programs, scalars = {"ROWS": rows, "WIDTH": width}, triton.cdiv(m, rows), (m, b.stride(0))
        return Plan(row_split, (programs,), scalars, tile, config["num_warps"])
    k = b.shape[1]
    config = dense_rows(b.device, b.dtype, bucket(k))
    tile = {"ROWS": min(config["ROWS"], bucket(m)), "BLOCK": min(config["BLOCK"], bucket(k))}
    # rows of a tile wait for its longest: fewer of them where there are few tiles
    while (
        tile["ROWS"] > 1
        and tile["ROWS"] * tile["BLOCK"] > 256
        and m * k < 4 * multiprocessors(b.device) * tile["ROWS"] * tile["BLOCK"]
    ):
        tile["ROWS"] //= 2
    programs = triton.cdiv(m, tile["ROWS"]) * triton.cdiv(k, tile["BLOCK"])
    return Plan(rows_times_dense, (programs,), (m, k, *b.stride()), tile, config["num_warps"])


class MergePlan:
    """Of ``(offsets, columns, values, b, rows, heads, runs, y)``: the parts, then the rows that they share."""

    def __init__(self, offsets: Tensor, columns: Tensor, values: Tensor, b: Tensor, rows: Tensor, *_: Tensor):
        m, z, parts = len(offsets) - 1, len(values), len(rows) - 1
        self.shape = (2, parts, *b.shape[1:])
        if b.ndim == 1:
            config = vector_parts(values.device, values.dtype)
            tile, items = merge_tile(values), merge_items(values)
            rows_at_once = min(bucket(items * m // max(m + z, 1) + 2, 32), tile)  # one step, if rows lie evenly
            constants = {"ITEMS": items, "TILE": tile, "ROWS": rows_at_once}
            self.sums = Plan(merge_parts, (parts,), (m + z, z, b.stride(0)), constants, config["num_warps"])
            self.add = Plan(add_open, (triton.cdiv(parts, 8),), (parts,), {"ROWS": 8, "WIDTH": 128}, 4)
            return
        k = b.shape[1]
        config = dense_parts(b.device, b.dtype, bucket(k))
        block = min(config["BLOCK"], bucket(k))
        constants = {"ITEMS": ITEMS, "REACH": config["REACH"], "BLOCK": block}
        programs = parts * triton.cdiv(k, block)
        self.sums = Plan(parts_times_dense, (programs,), (m + z, k, *b.stride()), constants, config["num_warps"])
        block = min(bucket(k), 32)
        self.add = Plan(add_open_rows, (parts * triton.cdiv(k, block),), (k,), {"REACH": 32, "BLOCK": block}, 4)

    def __call__(self, *tensors: Tensor) -> None:
        *matrix, b, rows, heads, runs, y = tensors
        opened, closed = torch.empty(self.shape, dtype=torch.float32, device=y.device)
        heads_of = (heads,) if b.ndim == 1 else ()
        self.sums(*matrix, b, rows, *heads_of, y, opened, closed)
        self.add(rows, runs, opened, closed, y)


merge_plans = Plans(MergePlan)


def by_rows(matrix: CSR, b: Tensor, y: Tensor) -> None:
    tensors = (matrix.row_offsets, matrix.columns, matrix.values, b)
    row_plans.of(tensors)(*tensors, y)


def by_parts(matrix: CSR, b: Tensor, y: Tensor) -> None:
    cut = partition(matrix, merge_items(matrix.values) if b.ndim == 1 else ITEMS)
    tensors = (matrix.row_offsets, matrix.columns, matrix.values, b, cut.rows, cut.heads, cut.runs)
    merge_plans.of(tensors)(*tensors, y)
