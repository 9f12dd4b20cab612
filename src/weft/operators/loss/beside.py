"""Cross entropy of long rows that lie side by side, as a transposed matrix has them: statistics of parts of rows, the losses
from these, and the gradient. Without a gradient the logits are read once, with it twice; no copy by rows is made.

A tile has 128 bytes of each column. Rows are cut into parts, since few tiles of whole rows would be too few programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import bucket
from weft.operators.launch import Plan, multiprocessors
from weft.operators.loss.kernels import capped, coefficients, gradient_of, labels_of, loss_of
from weft.operators.softmax.kernels import exponential, online_step

TILE = 4096  # elements of a program's tile
MOST_PARTS = 128  # of a row, which the losses' programs read


# ``height`` is the number of rows: here neighbours, so that what divides it matters (``launch.COUNTED``).
@triton.jit
def statistics_of_parts(
    x_ptr, weight_ptr, parts_ptr, height, V, x_row, x_col, weight_stride, cap, SPAN, HAS_WEIGHT: tl.constexpr,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of SPAN columns of each row: maximum, sum of exponentials, and with SMOOTH the sum of logits times their weights; parts
    is fp32 [3, parts, height]. Grid (row tiles, parts). Ignored rows are read too: a mask of them would split loads."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * SPAN
    end = tl.minimum(first + SPAN, V)
    top = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    weighted = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        col = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = (row[:, None] < height) & (col[None, :] < end)
        at = x_ptr + row[:, None] * x_row + col[None, :] * x_col
        x = tl.load(at, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
        x = capped(x, cap, CAP, ACCURATE)
        if CAP:
            x = tl.where(inside, x, -float("inf"))
        top, total = online_step(x, top, total, ACCURATE)
        if SMOOTH:
            if HAS_WEIGHT:
                x *= tl.load(weight_ptr + col * weight_stride, mask=col < end, other=0.0).to(tl.float32)[None, :]
            weighted += tl.where(inside, x, 0.0)
    best = tl.max(top, axis=1)
    base = tl.where(best == -float("inf"), 0.0, best)
    total = tl.sum(total * exponential(top - base[:, None], ACCURATE), axis=1)
    each = tl.num_programs(1).to(tl.int64) * height
    at = parts_ptr + tl.program_id(1).to(tl.int64) * height + row
    tl.store(at, best, mask=row < height)
    tl.store(at + each, total, mask=row < height)
    if SMOOTH:
        tl.store(at + 2 * each, tl.sum(weighted, axis=1), mask=row < height)


@triton.jit(do_not_specialize=["parts"])
def losses_of_parts(
    x_ptr, target_ptr, weight_ptr, sums_ptr, parts_ptr, loss_ptr, stats_ptr, M, V, x_row, x_col, target_stride, weight_stride,
    ignore, smoothing, z, cap, parts, HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
    ACCURATE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """loss [M] and stats [2, M] (each row's maximum and sum of exponentials); PARTS is a power of two from their number up."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    label, counts, weight, by_weight, by_number, all_weights = labels_of(
        target_ptr, weight_ptr, sums_ptr, row, M, V, target_stride, weight_stride, ignore,
        HAS_WEIGHT, MEAN, HAS_WEIGHT and SMOOTH,
    )  # fmt: skip
    x_t = tl.load(x_ptr + row * x_row + label * x_col, mask=counts, other=0.0).to(tl.float32)
    x_t = capped(x_t, cap, CAP, ACCURATE)
    p = tl.arange(0, PARTS)[:, None].to(tl.int64)
    known, each = (p < parts) & (row[None, :] < M), parts.to(tl.int64) * M
    at = parts_ptr + p * M + row[None, :]
    tops = tl.load(at, mask=known, other=-float("inf"))
    best = tl.max(tops, axis=0)
    base = tl.where(best == -float("inf"), 0.0, best)
    totals = tl.load(at + each, mask=known, other=0.0)
    total = tl.sum(totals * exponential(tops - base[None, :], ACCURATE), axis=0)
    lse = best + tl.log(total)
    weighted = total
    if SMOOTH:
        weighted = tl.sum(tl.load(at + 2 * each, mask=known, other=0.0), axis=0)
    loss = loss_of(lse, x_t, weighted, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0 * by_weight), mask=row < M)  # NaN for the mean over no label
    tl.store(stats_ptr + row, best, mask=row < M)
    tl.store(stats_ptr + M + row, total, mask=row < M)


@triton.jit
def gradient_beside(
    x_ptr, target_ptr, weight_ptr, sums_ptr, stats_ptr, dloss_ptr, dx_ptr, height, V, x_row, x_col, target_stride,
    weight_stride, dloss_stride, dx_row, dx_col, ignore, smoothing, z, cap, SPAN, HAS_WEIGHT: tl.constexpr,
    MEAN: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, ACCURATE: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx from the logits, each row's stats and, if SCALED, the gradient of each row's loss. Grid (row tiles, parts). The last
    program first: the pass before this one left its logits in L2."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.num_programs(1) - 1 - tl.program_id(1)
    label, counts, weight, by_weight, by_number, all_weights = labels_of(
        target_ptr, weight_ptr, sums_ptr, row, height, V, target_stride, weight_stride, ignore,
        HAS_WEIGHT, MEAN, HAS_WEIGHT and SMOOTH,
    )  # fmt: skip
    top = tl.load(stats_ptr + row, mask=counts, other=0.0)
    total = tl.load(stats_ptr + height + row, mask=counts, other=1.0)
    lse = top + tl.log(total)
    of_p, spread, at_label = coefficients(lse, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
    scale = of_p * tl.div_rn(1.0, total)
    if SCALED:
        dloss = tl.load(dloss_ptr + row * dloss_stride, mask=counts, other=0.0).to(tl.float32)
        scale, spread, at_label = scale * dloss, spread * dloss, at_label * dloss
    label = tl.where(counts, label, -1).to(tl.int32)[:, None]  # V is below 2**31
    end = tl.minimum((part + 1) * SPAN, V)
    for start in range(part * SPAN, end, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = (row[:, None] < height) & (col[None, :] < end)
        at = x_ptr + row[:, None] * x_row + col[None, :].to(tl.int64) * x_col
        x = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
        x = capped(x, cap, CAP, ACCURATE)
        g = gradient_of(
            exponential(x - top[:, None], ACCURATE), x, col[None, :], label, scale[:, None], spread[:, None],
            at_label[:, None], weight_ptr, weight_stride, V, cap, HAS_WEIGHT, SMOOTH, CAP,
        )  # fmt: skip
        g = tl.where(label >= 0, g, 0.0)
        at = dx_ptr + row[:, None] * dx_row + col[None, :].to(tl.int64) * dx_col
        tl.store(at, g.to(dx_ptr.dtype.element_ty), mask=inside)


# ---- launches, of a LossCall or a GradientCall (dispatch.py) ---------------------------------------------------------


def parts_of(x: Tensor) -> tuple[tuple[int, int], int, dict[str, int]]:
    """The grid (row tiles, parts), the columns of a part, and a program's tile."""
    m, v = x.shape
    rows = min(128 // x.element_size(), bucket(m))
    single = (
        x.element_size() == 4 and x.stride(1) % 2 > 0
    )  # fp32 by single elements: fewer, for their addresses' registers
    tiles, block = triton.cdiv(m, rows), min(TILE // (2 if single else 1) // rows, bucket(v))
    wanted = min(triton.cdiv(8 * multiprocessors(x.device), tiles), MOST_PARTS)  # eight share a multiprocessor
    span = triton.cdiv(triton.cdiv(v, block), wanted) * block
    return (tiles, triton.cdiv(v, span)), span, {"ROWS": rows, "BLOCK": block}


class LossBeside:
    """Of ``(x, target, weight, sums, loss, stats, dx)``."""

    def __init__(self, c: Any):
        (m, v), (grid, span, shape), flags = c.x.shape, parts_of(c.x), c.flags()
        self.parts, cap = grid[1], c.numbers[-1]
        strides = (*c.x.stride(), c.target.stride(0), c.w.stride(0))
        of_logits = {name: flags[name] for name in ("HAS_WEIGHT", "SMOOTH", "CAP", "ACCURATE")}
        scalars = (m, v, *c.x.stride(), c.w.stride(0), cap, span)
        self.statistics = Plan(statistics_of_parts, grid, scalars, {**of_logits, **shape}, 8)
        scalars, few = (m, v, *strides, *c.numbers, self.parts), {"ROWS": 32, "PARTS": bucket(self.parts)}
        self.losses = Plan(losses_of_parts, (triton.cdiv(m, 32),), scalars, {**flags, **few}, 4)
        self.gradient = gradient_launch(c, 0, scaled=False) if c.at_once else None

    def __call__(self, x: Tensor, target: Tensor, weight: Tensor, sums: Tensor, loss: Tensor, *rest: Tensor) -> None:
        stats, dx = rest
        parts = torch.empty((3, self.parts, x.shape[0]), dtype=torch.float32, device=x.device)
        self.statistics(x, weight, parts)
        self.losses(x, target, weight, sums, parts, loss, stats)
        if self.gradient is not None:
            self.gradient(x, target, weight, sums, stats, stats, dx)


def gradient_launch(c: Any, dloss_stride: int, scaled: bool = True) -> Plan:
    """Of ``(x, target, weight, sums, stats, dloss, dx)``; dx may be x."""
    (m, v), (grid, span, shape) = c.x.shape, parts_of(c.x)
    strides = (*c.x.stride(), c.target.stride(0), c.w.stride(0), dloss_stride, *c.dx.stride())
    constants = {**c.flags(), "SCALED": scaled, **shape}
    warps = 4 if scaled else 8  # measured; it is a matter of registers
    return Plan(gradient_beside, grid, (m, v, *strides, *c.numbers, span), constants, warps)
