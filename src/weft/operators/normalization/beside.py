"""The norms' forward pass over long rows that lie side by side, as a transposed matrix has them.

A tile has 128 bytes of each column. Rows are cut into parts, since few tiles of whole rows would be too few programs; each
part's mean and sum of squares around it are added up by the pass that writes y, as Chan, Golub & LeVeque do (1983, "Algorithms
for computing the sample variance").
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import bucket
from weft.operators.launch import Plan, multiprocessors
from weft.operators.layout import views
from weft.operators.normalization.kernels import read, reciprocal_root, scaled, tile, with_copies, write

TILE = 4096  # elements of a program's tile
MOST_SUMS = 2048  # of parts, that each program that writes y reads of its rows


# ``height`` is the number of rows: here neighbours, so that what divides it matters (``launch.COUNTED``).
@triton.jit
def sums_of_parts(
    x_ptr, r_ptr, h_ptr, sums_ptr, height, N, x_row, x_col, r_row, r_col, h_row, h_col, SPAN, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CENTERED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """h = x + r, and of SPAN columns of each row: the sum of squares of h, or CENTERED the mean and the sum of squares around
    it; sums is fp32 [2, parts, height]. Grid (row tiles, parts)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * SPAN
    end = tl.minimum(first + SPAN, N)
    columns = tl.arange(0, BLOCK)
    around = tl.zeros([ROWS, BLOCK], tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        col = (start + columns).to(tl.int64)
        inside = (row[:, None] < height) & (col[None, :] < end)
        x = read(tile(x_ptr, row, x_row, col, x_col), inside)
        if ADDED:
            x += read(tile(r_ptr, row, r_row, col, r_col), inside)
            x = x.to(h_ptr.dtype.element_ty)  # what is normalised is what the next layer gets
            write(tile(h_ptr, row, h_row, col, h_col), x, inside)
            x = x.to(tl.float32)
        if CENTERED:  # around a lane's first element, which is near enough to the mean that little cancels
            around = tl.where(start == first, x, around)
            x = tl.where(inside, x - around, 0.0)
            total += x
        squares += x * x
    at = tl.program_id(1).to(tl.int64) * height + row
    if CENTERED:
        count = tl.maximum((end - first - columns + BLOCK - 1) // BLOCK, 0).to(tl.float32)[
            None, :
        ]  # that a lane has seen
        near = tl.sum(around, axis=1) / tl.minimum(end - first, BLOCK)  # from here on sums are of small numbers
        mean = near + tl.sum((around - near[:, None]) * count + total, axis=1) / (end - first)
        off = around - mean[:, None]
        squares += off * (2.0 * total + off * count)
        tl.store(sums_ptr + at, mean, mask=row < height)
    behind = tl.num_programs(1).to(tl.int64) * height
    tl.store(sums_ptr + behind + at, tl.sum(squares, axis=1), mask=row < height)


@triton.jit
def rows_by_sums(
    h_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, sums_ptr, height, N, h_row, h_col, y_row, y_col, SPAN, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr, SAVED: tl.constexpr,
):  # fmt: skip
    """y = (h - mean) * rstd * w + b; PARTS is a power of two from their number up. The last program first: the pass before this
    one left its columns in L2."""
    parts = tl.num_programs(1)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part, p = parts - 1 - tl.program_id(1), tl.arange(0, PARTS)
    at = sums_ptr + p[:, None].to(tl.int64) * height + row[None, :]
    known = (p[:, None] < parts) & (row[None, :] < height)
    squares = tl.load(at + parts.to(tl.int64) * height, mask=known, other=0.0)
    mean = tl.zeros([ROWS], tl.float32)
    if CENTERED:
        count = tl.minimum(SPAN, tl.maximum(N - p * SPAN, 0)).to(tl.float32)[:, None]
        means, near = tl.load(at, mask=known, other=0.0), tl.load(sums_ptr + row, mask=row < height, other=0.0)
        mean = near + tl.sum((means - near[None, :]) * count, axis=0) / N
        squares += tl.where(known, (means - mean[None, :]) * (means - mean[None, :]) * count, 0.0)
    rstd = reciprocal_root(tl.sum(squares, axis=0) / N, eps)
    if SAVED:
        tl.store(mean_ptr + row, mean, mask=(row < height) & (part == 0))
        tl.store(rstd_ptr + row, rstd, mask=(row < height) & (part == 0))
    end = tl.minimum((part + 1) * SPAN, N)
    for start in range(part * SPAN, end, BLOCK):
        col = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = (row[:, None] < height) & (col[None, :] < end)
        h = tl.load(tile(h_ptr, row, h_row, col, h_col), mask=inside, other=0.0).to(tl.float32)
        if CENTERED:
            h -= mean[:, None]
        y = scaled(h * rstd[:, None], w_ptr, b_ptr, col[None, :], N, WEIGHTED, BIASED)
        write(tile(y_ptr, row, y_row, col, y_col), y, inside)


@with_copies
def beside_launch(c: Any) -> Any:
    """Of a ``NormCall`` (dispatch.py)."""
    norm, residual = c.config, c.x if c.residual is None else c.residual
    (m, n, *x_s), (_, _, *r_s), (_, _, *y_s) = views(c.x, residual, torch.empty_like(c.x, device="meta"))
    rows = min(128 // c.x.element_size(), bucket(m))
    # fp32 by single elements: half as many a thread, for the registers of their addresses
    single = c.x.element_size() == 4 and any(column % 2 for _, column in (x_s, r_s, y_s))
    block, tiles = TILE // (2 if single else 1) // rows, triton.cdiv(m, rows)
    programs = 8 * multiprocessors(c.x.device)  # that run at once
    wanted = min(triton.cdiv(programs, tiles), MOST_SUMS // rows)
    span = triton.cdiv(triton.cdiv(n, block), wanted) * block
    grid = tiles, triton.cdiv(n, span)
    shape, h_s = {"ROWS": rows, "BLOCK": block}, y_s if norm.added else x_s
    flags = {"CENTERED": norm.centered, "ADDED": norm.added}
    sums = Plan(sums_of_parts, grid, (m, n, *x_s, *r_s, *y_s, span), {**shape, **flags}, 8)
    flags = {**norm.flags, "BIASED": norm.biased, "SAVED": c.saved, "PARTS": bucket(grid[1])}
    columns = Plan(rows_by_sums, grid, (m, n, *h_s, *y_s, span, c.eps), {**shape, **flags}, 8)

    def launch(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, y: Tensor, h: Tensor, mean: Tensor, rstd: Tensor
    ) -> None:
        partial = torch.empty((2, grid[1], m), dtype=torch.float32, device=x.device)
        sums(x, residual, h, partial)
        columns(h, weight, bias, y, mean, rstd, partial)

    return launch
