"""Triton kernels of Y = A·B for a CSR A [M, N] and a dense B [N, K]: rows side by side (row-split), or equal parts (merge).

Every stored element gathers a row of B, of which a program takes BLOCK columns: whole lines, unlike spmv's single elements.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, Plans
from weft.operators.sparse.spmv_kernels import STEPS

ITEMS = 64 if INTERPRETING else 512  # rows and elements of a merge part


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


# ---- plans -----------------------------------------------------------------------------------------------------------


def rows_heuristic(sm: int, dtype: torch.dtype, k: int) -> Config:
    """8 sums a thread; four rows of B are on their way to each."""
    return {"ROWS": max(1024 // min(k, 128), 1), "BLOCK": min(k, 128), "num_warps": 4}


def rows_candidates(sm: int, dtype: torch.dtype, k: int) -> Any:
    blocks = [b for b in (32, 64, 128, 256, 512) if b <= k] or [k]
    every = grid_of({"ROWS": (1, 2, 4, 8, 16, 32, 64), "BLOCK": blocks, "num_warps": (1, 2, 4, 8)})
    return [c for c in every if 2 <= c["ROWS"] * c["BLOCK"] // (32 * c["num_warps"]) <= 16]


def parts_heuristic(sm: int, dtype: torch.dtype, k: int) -> Config:
    """One warp a part, 8 elements at a time: the sum over them stays within a thread where K fills a warp."""
    return {"REACH": 8, "BLOCK": min(k, 128), "num_warps": 1}


def parts_candidates(sm: int, dtype: torch.dtype, k: int) -> Any:
    blocks = [b for b in (32, 64, 128, 256, 512) if b <= k] or [k]
    every = grid_of({"REACH": (2, 4, 8, 16, 32), "BLOCK": blocks, "num_warps": (1, 2, 4)})
    return [c for c in every if 4 <= c["REACH"] * c["BLOCK"] // (32 * c["num_warps"]) <= 64]


rows_configuration = Configurations(__file__, "rows_times_dense", rows_heuristic, rows_candidates)
parts_configuration = Configurations(__file__, "parts_times_dense", parts_heuristic, parts_candidates)


def row_plan(offsets: Tensor, columns: Tensor, values: Tensor, b: Tensor) -> Plan:
    """Of ``(offsets, columns, values, b, y)``."""
    m, k = len(offsets) - 1, b.shape[1]
    config = rows_configuration(b.device, b.dtype, bucket(k))
    tile = {"ROWS": min(config["ROWS"], bucket(m)), "BLOCK": min(config["BLOCK"], bucket(k))}
    grid = (triton.cdiv(m, tile["ROWS"]) * triton.cdiv(k, tile["BLOCK"]),)
    return Plan(rows_times_dense, grid, (m, k, *b.stride()), tile, config["num_warps"])


class MergePlan:
    """Of ``(offsets, columns, values, b, rows, runs, y)``: the parts, then the rows that they share."""

    def __init__(self, offsets: Tensor, columns: Tensor, values: Tensor, b: Tensor, rows: Tensor, runs: Tensor):
        m, z, k = len(offsets) - 1, len(values), b.shape[1]
        config = parts_configuration(b.device, b.dtype, bucket(k))
        block = min(config["BLOCK"], bucket(k))
        self.shape = (2, len(runs), k)
        programs = len(runs) * triton.cdiv(k, block)
        tile = {"ITEMS": ITEMS, "REACH": config["REACH"], "BLOCK": block}
        self.sums = Plan(parts_times_dense, (programs,), (m + z, k, *b.stride()), tile, config["num_warps"])
        block = min(bucket(k), 32)
        programs = len(runs) * triton.cdiv(k, block)
        self.add = Plan(add_open_rows, (programs,), (k,), {"REACH": 32, "BLOCK": block}, 4)

    def __call__(
        self, offsets: Tensor, columns: Tensor, values: Tensor, b: Tensor, rows: Tensor, runs: Tensor, y: Tensor
    ) -> None:
        opened, closed = torch.empty(self.shape, dtype=torch.float32, device=y.device)
        self.sums(offsets, columns, values, b, rows, y, opened, closed)
        self.add(rows, runs, opened, closed, y)


row_plans = Plans(row_plan)
merge_plans = Plans(MergePlan)
