"""Triton kernels of cross entropy over logits [M, V], and the plans that pick their tiles.

For row m with label t, weight w_t, logits x (capped), p = softmax(x), and with e for the label smoothing:

    loss     = s_w * ((1 - e) * w_t * (lse - x_t) + e / V * sum_v w_v * (lse - x_v)) + s_n * z * lse²
    gradient = p * A - e / V * w_v * s_w - [v = t] * (1 - e) * w_t * s_w
    A        = s_w * ((1 - e) * w_t + e / V * sum_v w_v) + s_n * 2 * z * lse

where s_w and s_n are 1, or for the mean one over the labels' weights and over their number (``label_sums.py``). Whatever
asks for the gradient with the loss reads the logits once, up to ``ONE_PASS`` columns; longer rows are read twice, the second
time from L2 where they fit (``cluster.cu`` keeps them on chip).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import Plan
from weft.operators.row_programs import ONE_PASS, candidates, heuristic
from weft.operators.softmax.kernels import exponential


@dataclass(frozen=True)
class Options:
    """What a call asks for besides its tensors; ``soft_cap`` 0 is none."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0
    reduction: str = "mean"


@triton.jit
def tanh(u, ACCURATE: tl.constexpr):
    """ACCURATE also near 0, where 1 - 2 / (exp(2u) + 1) cancels: a polynomial that was fitted on 0 <= |u| <= 0.65 (1 ulp)."""
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(u)) + 1.0)
    far = tl.where(u < 0.0, -far, far)
    if ACCURATE:
        s = u * u
        near = s * (s * (s * (s * -0.005927672 + 0.020876284) - 0.053824256) + 0.13332583) - 0.33333327
        far = tl.where(tl.abs(u) < 0.65, u + u * s * near, far)
    return far


@triton.jit
def capped(x, cap, CAP: tl.constexpr, ACCURATE: tl.constexpr):
    if CAP:
        return cap * tanh(x / cap, ACCURATE)
    else:
        return x


@triton.jit
def labels_of(
    target_ptr, weight_ptr, sums_ptr, row, M, V, target_stride, weight_stride, ignore,
    HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, ALL_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Of some rows: label (0 where there is none), whether it counts, its weight (NaN for a label out of range, which makes
    all of the row NaN), s_w, s_n, and the sum of all weights."""
    label = tl.load(target_ptr + row * target_stride, mask=row < M, other=ignore).to(tl.int64)
    counts = (row < M) & (label != ignore)
    known = (label >= 0) & (label < V)
    label = tl.where(known, label, 0)
    weight = tl.where(known, 1.0, float("nan"))
    if HAS_WEIGHT:
        read = tl.load(weight_ptr + label * weight_stride, mask=counts, other=0.0).to(tl.float32)
        weight = tl.where(known, read, float("nan"))
    by_weight = 1.0
    by_number = 1.0
    if MEAN:
        by_weight = tl.div_rn(1.0, tl.load(sums_ptr))
        by_number = tl.div_rn(1.0, tl.load(sums_ptr + 1))
    all_weights = V * 1.0
    if ALL_WEIGHTS:
        all_weights = tl.load(sums_ptr + 2)
    return label, counts, weight, by_weight, by_number, all_weights


@triton.jit
def loss_of(lse, x_t, weighted_sum, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH: tl.constexpr):
    loss = weight * (lse - x_t)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing / V * (all_weights * lse - weighted_sum)
    return by_weight * loss + by_number * z * lse * lse


@triton.jit
def coefficients(lse, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH: tl.constexpr):
    """(A, what is taken from each class for each unit of its weight, what is taken at the label): the head of this file."""
    at_label = by_weight * weight
    spread = at_label * 0.0
    of_p = at_label
    if SMOOTH:
        at_label *= 1.0 - smoothing
        spread = by_weight * smoothing / V + spread  # NaN for a label out of range
        of_p = at_label + spread * all_weights
    return of_p + by_number * 2.0 * z * lse, spread, at_label


@triton.jit
def gradient_of(
    e, x, col, label, scale, spread, at_label, weight_ptr, weight_stride, V, cap,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Of columns ``col`` with their capped logits x and exponentials e, which A over the row's sum scales; rows' values are
    broadcast by the caller."""
    g = e * scale
    if SMOOTH:
        if HAS_WEIGHT:
            g -= spread * tl.load(weight_ptr + col * weight_stride, mask=col < V, other=0.0).to(tl.float32)
        else:
            g -= spread
    g = tl.where(col == label, g - at_label, g)
    if CAP:
        slope = x / cap
        g *= 1.0 - slope * slope
    return g


@triton.jit
def cross_entropy_rows(
    x_ptr, target_ptr, weight_ptr, sums_ptr, loss_ptr, stats_ptr, dx_ptr, M, V, x_row, x_col, target_stride, weight_stride,
    dx_row, dx_col, ignore, smoothing, z, cap, HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, GRADIENT: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss [M], stats [2, M] (each row's maximum and sum of exponentials) and, with GRADIENT, dx [M, V]. One program holds ROWS
    whole rows; rows that are ignored are not read."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    label, counts, weight, by_weight, by_number, all_weights = labels_of(
        target_ptr, weight_ptr, sums_ptr, row, M, V, target_stride, weight_stride, ignore,
        HAS_WEIGHT, MEAN, HAS_WEIGHT and SMOOTH,
    )  # fmt: skip
    inside = counts[:, None] & (col[None, :] < V)
    at = x_ptr + row[:, None] * x_row + col[None, :] * x_col
    x = tl.load(at, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
    x_t = tl.load(x_ptr + row * x_row + label * x_col, mask=counts, other=0.0).to(tl.float32)
    x_t = capped(x_t, cap, CAP, ACCURATE)
    x = capped(x, cap, CAP, ACCURATE)
    if CAP:
        x = tl.where(inside, x, -float("inf"))
    top = tl.max(x, axis=1)
    base = tl.where(top == -float("inf"), 0.0, top)
    e = exponential(x - base[:, None], ACCURATE)
    total = tl.sum(e, axis=1)
    lse = top + tl.log(total)
    weighted_sum = total
    if SMOOTH:
        if HAS_WEIGHT:
            w = tl.load(weight_ptr + col * weight_stride, mask=col < V, other=0.0).to(tl.float32)
            weighted_sum = tl.sum(tl.where(inside, x * w[None, :], 0.0), axis=1)
        else:
            weighted_sum = tl.sum(tl.where(inside, x, 0.0), axis=1)
    loss = loss_of(lse, x_t, weighted_sum, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0 * by_weight), mask=row < M)  # NaN for the mean over no label
    tl.store(stats_ptr + row, top, mask=row < M)
    tl.store(stats_ptr + M + row, total, mask=row < M)
    if GRADIENT:
        of_p, spread, at_label = coefficients(lse, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
        scale = of_p * tl.div_rn(1.0, total)
        g = gradient_of(
            e, x, col[None, :], label[:, None], scale[:, None], spread[:, None], at_label[:, None], weight_ptr,
            weight_stride, V, cap, HAS_WEIGHT, SMOOTH, CAP,
        )  # fmt: skip
        g = tl.where(counts[:, None], g, 0.0)
        at = dx_ptr + row[:, None] * dx_row + col[None, :] * dx_col
        tl.store(at, g.to(dx_ptr.dtype.element_ty), mask=(row[:, None] < M) & (col[None, :] < V))


@triton.jit
def cross_entropy_long_rows(
    x_ptr, target_ptr, weight_ptr, sums_ptr, loss_ptr, stats_ptr, dx_ptr, M, V, x_row, x_col, target_stride, weight_stride,
    dx_row, dx_col, ignore, smoothing, z, cap, HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, SMOOTH: tl.constexpr,
    CAP: tl.constexpr, GRADIENT: tl.constexpr, ACCURATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for a row that does not fit: one program walks it for its sums (online softmax, Milakov & Gimelshein 2018),
    and again for the gradient."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    label, counts, weight, by_weight, by_number, all_weights = labels_of(
        target_ptr, weight_ptr, sums_ptr, row, M, V, target_stride, weight_stride, ignore,
        HAS_WEIGHT, MEAN, HAS_WEIGHT and SMOOTH,
    )  # fmt: skip
    x_t = tl.load(x_ptr + row * x_row + label * x_col, mask=counts, other=0.0).to(tl.float32)
    x_t = capped(x_t, cap, CAP, ACCURATE)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    end = tl.where(counts, V, 0)  # of an ignored row nothing is read
    for start in range(0, end, BLOCK):
        c = (start + col).to(tl.int64)
        x = tl.load(x_ptr + row * x_row + c * x_col, mask=c < V, other=-float("inf"), eviction_policy="evict_last")
        x = capped(x.to(tl.float32), cap, CAP, ACCURATE)
        if CAP:
            x = tl.where(c < V, x, -float("inf"))
        higher = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that has seen only -inf
        total = total * exponential(top - base, ACCURATE) + exponential(x - base, ACCURATE)
        top = higher
        if SMOOTH:
            if HAS_WEIGHT:
                w = tl.load(weight_ptr + c * weight_stride, mask=c < V, other=0.0).to(tl.float32)
                weighted += tl.where(c < V, x * w, 0.0)
            else:
                weighted += tl.where(c < V, x, 0.0)
    best = tl.max(top, axis=0)
    base = tl.where(best == -float("inf"), 0.0, best)
    sum_e = tl.sum(total * exponential(top - base, ACCURATE), axis=0)
    lse = best + tl.log(sum_e)
    weighted_sum = tl.sum(weighted, axis=0)
    loss = loss_of(lse, x_t, weighted_sum, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0 * by_weight))
    tl.store(stats_ptr + row, best)
    tl.store(stats_ptr + M + row, sum_e)
    if GRADIENT:
        of_p, spread, at_label = coefficients(lse, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
        scale = of_p * tl.div_rn(1.0, sum_e)
        for start in range(0, V, BLOCK):
            c = (start + col).to(tl.int64)
            x = tl.load(x_ptr + row * x_row + c * x_col, mask=(c < V) & counts, eviction_policy="evict_first")
            x = capped(x.to(tl.float32), cap, CAP, ACCURATE)
            e = exponential(x - best, ACCURATE)
            g = gradient_of(
                e, x, c, label, scale, spread, at_label, weight_ptr, weight_stride, V, cap, HAS_WEIGHT, SMOOTH, CAP
            )
            g = tl.where(counts, g, 0.0)
            tl.store(dx_ptr + row * dx_row + c * dx_col, g.to(dx_ptr.dtype.element_ty), mask=c < V)


@triton.jit
def cross_entropy_gradient(
    x_ptr, target_ptr, weight_ptr, sums_ptr, stats_ptr, dloss_ptr, dx_ptr, M, V, x_row, x_col, target_stride, weight_stride,
    dloss_stride, dx_row, dx_col, ignore, smoothing, z, cap, HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, ACCURATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx from the logits, each row's stats, and the gradient of each row's loss: element by element."""
    blocks = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    col = first + tl.arange(0, BLOCK)
    label, counts, weight, by_weight, by_number, all_weights = labels_of(
        target_ptr, weight_ptr, sums_ptr, row, M, V, target_stride, weight_stride, ignore,
        HAS_WEIGHT, MEAN, HAS_WEIGHT and SMOOTH,
    )  # fmt: skip
    inside = counts[:, None] & (col[None, :] < V)
    at = x_ptr + row[:, None] * x_row + col[None, :] * x_col
    x = tl.load(at, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
    top = tl.load(stats_ptr + row, mask=counts, other=0.0)
    total = tl.load(stats_ptr + M + row, mask=counts, other=1.0)
    lse = top + tl.log(total)
    dloss = tl.load(dloss_ptr + row * dloss_stride, mask=counts, other=0.0).to(tl.float32)
    of_p, spread, at_label = coefficients(lse, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
    # What a row needs is decided once for all of its elements: instructions an element are the limit of this kernel.
    scale = tl.where(counts, of_p * dloss * tl.div_rn(1.0, total), 0.0)[:, None]
    spread = tl.where(counts, spread * dloss, 0.0)[:, None]
    at_label = tl.where(counts, at_label * dloss, 0.0)[:, None]
    here = tl.maximum(tl.minimum(label - first, BLOCK), -1).to(tl.int32)[:, None]
    x = capped(x, cap, CAP, ACCURATE)
    g = gradient_of(
        exponential(x - top[:, None], ACCURATE), x, tl.arange(0, BLOCK)[None, :], here, scale, spread, at_label,
        weight_ptr + first * weight_stride, weight_stride, V - first, cap, HAS_WEIGHT, SMOOTH, CAP,
    )  # fmt: skip
    at = dx_ptr + row[:, None] * dx_row + col[None, :] * dx_col
    tl.store(at, g.to(dx_ptr.dtype.element_ty), mask=(row[:, None] < M) & (col[None, :] < V))


@triton.jit
def scale_unless_one(factor_ptr, x_ptr, M, N, x_row, x_col, BLOCK: tl.constexpr):
    """x *= factor, a scalar that stays on the device: where it is 1, as for a loss that is the root, nothing is touched."""
    factor = tl.load(factor_ptr).to(tl.float32)
    blocks = tl.cdiv(N, BLOCK)
    tiles = tl.where(factor == 1.0, 0, M * blocks)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        col = (tile % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        at = x_ptr + (tile // blocks).to(tl.int64) * x_row + col * x_col
        x = tl.load(at, mask=col < N).to(tl.float32)
        tl.store(at, (x * factor).to(x_ptr.dtype.element_ty), mask=col < N)


# ---- plans -----------------------------------------------------------------------------------------------------------


def gradient_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    block = min(n, 4096)
    return {"ROWS": max(1, 1024 // block), "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


def gradient_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    blocks = [b for b in (1024, 2048, 4096, 8192) if b <= n] or [n]
    every = grid_of({"ROWS": (1, 2, 4, 8, 16), "BLOCK": blocks, "num_warps": (2, 4, 8, 16)})
    return [c for c in every if 4 <= c["ROWS"] * c["BLOCK"] // (32 * c["num_warps"]) <= 32]


loss_configuration = Configurations(__file__, "loss", heuristic, candidates)
with_gradient_configuration = Configurations(__file__, "loss_with_gradient", heuristic, candidates)
gradient_configuration = Configurations(__file__, "gradient", gradient_heuristic, gradient_candidates)


def _flags(x: Tensor, options: Options, has_weight: bool, **more: bool) -> dict[str, Any]:
    """Compile-time constants in the order of the kernels' signatures."""
    return {
        "HAS_WEIGHT": has_weight,
        "MEAN": options.reduction == "mean",
        "SMOOTH": options.label_smoothing > 0,
        "CAP": options.soft_cap > 0,
        **more,
        "ACCURATE": x.dtype == torch.float32,
    }


def _numbers(options: Options) -> tuple[int | float, ...]:
    return options.ignore_index, float(options.label_smoothing), float(options.z_loss), float(options.soft_cap)


def rows_plan(
    x: Tensor, target: Tensor, weight: Tensor, dx: Tensor, options: Options, has_weight: bool, gradient: bool
) -> Plan:
    """Of ``(x, target, weight, sums, loss, stats, dx)``; without a weight, sums or gradient any tensor stands in for it."""
    m, v = x.shape
    scalars = (v, *x.stride(), target.stride(0), weight.stride(0), *dx.stride(), *_numbers(options))
    flags = _flags(x, options, has_weight, GRADIENT=gradient)
    config = (with_gradient_configuration if gradient else loss_configuration)(x.device, x.dtype, bucket(v))
    if v > ONE_PASS:
        tile = {"BLOCK": config["BLOCK"]}
        return Plan(cross_entropy_long_rows, (m,), (m, *scalars), {**flags, **tile}, config["num_warps"])
    tile = {"ROWS": config["ROWS"], "BLOCK": bucket(v)}
    grid = (triton.cdiv(m, config["ROWS"]),)
    return Plan(cross_entropy_rows, grid, (m, *scalars), {**flags, **tile}, config["num_warps"])


def gradient_plan(
    x: Tensor, target: Tensor, weight: Tensor, dloss: Tensor, dx: Tensor, options: Options, has_weight: bool
) -> Plan:
    """Of ``(x, target, weight, sums, stats, dloss, dx)``; dloss is [M], or [] for the mean and the sum."""
    m, v = x.shape
    config = gradient_configuration(x.device, x.dtype, bucket(v))
    dloss_stride = dloss.stride(0) if dloss.ndim else 0
    scalars = (m, v, *x.stride(), target.stride(0), weight.stride(0), dloss_stride, *dx.stride(), *_numbers(options))
    tile = {"ROWS": config["ROWS"], "BLOCK": min(config["BLOCK"], bucket(v))}
    grid = (triton.cdiv(m, tile["ROWS"]) * triton.cdiv(v, tile["BLOCK"]),)
    return Plan(cross_entropy_gradient, grid, scalars, {**_flags(x, options, has_weight), **tile}, config["num_warps"])


def scale_plan(x: Tensor, programs: int) -> Plan:
    """Of ``(factor, x)``, x [M, N]."""
    (m, n), strides = (x.shape, x.stride()) if not x.is_contiguous() else ((1, x.numel()), (0, 1))
    block = min(bucket(n), 4096)
    tiles = m * triton.cdiv(n, block)
    return Plan(scale_unless_one, (min(tiles, programs),), (m, n, *strides), {"BLOCK": block}, 8)
