"""Triton kernels of cross entropy over logits [M, V], and their launches.

For row m with label t, weight w_t, logits x (capped), p = softmax(x), and with e for the label smoothing:

    loss     = s_w * ((1 - e) * w_t * (lse - x_t) + e / V * sum_v w_v * (lse - x_v)) + s_n * z * lse²
    gradient = p * A - e / V * w_v * s_w - [v = t] * (1 - e) * w_t * s_w
    A        = s_w * ((1 - e) * w_t + e / V * sum_v w_v) + s_n * 2 * z * lse

where s_w and s_n are 1, or for the mean one over the labels' weights and over their number (``LabelSums``). A call
that makes the gradient with the loss reads the logits once, up to ``ONE_PASS`` columns; longer rows are read twice, the second
time from L2 where they fit (``cluster.cu`` keeps them on chip).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators import row_programs
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.contiguous import side_by_side
from weft.operators.launch import INTERPRETING, Plan, Plans, multiprocessors
from weft.operators.row_programs import candidates, heuristic
from weft.operators.softmax.kernels import exponential, online_step


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
    """For some rows: label (0 where there is none), whether it counts, its weight (NaN for a label out of range, which makes
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
    """(A, what each class loses for each unit of its weight, what the label loses): the formulas at the head of this file."""
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
def row_sums(x, x_t, inside, cap, CAP: tl.constexpr, ACCURATE: tl.constexpr):
    """Of whole rows: (capped logits, the label's, their maximum, exponentials, the sum of these)."""
    x_t = capped(x_t, cap, CAP, ACCURATE)
    x = capped(x, cap, CAP, ACCURATE)
    if CAP:
        x = tl.where(inside, x, -float("inf"))
    top = tl.max(x, axis=1)
    base = tl.where(top == -float("inf"), 0.0, top)
    e = exponential(x - base[:, None], ACCURATE)
    return x, x_t, top, e, tl.sum(e, axis=1)


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
    x, x_t, top, e, total = row_sums(x, x_t, inside, cap, CAP, ACCURATE)
    lse = top + tl.log(total)
    weighted_sum = total
    if SMOOTH:
        if HAS_WEIGHT:  # loaded here: earlier, with the exponentials, it spills
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
    """The same for a row that does not fit: one program reads it for its sums (online softmax, Milakov & Gimelshein 2018),
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
        top, total = online_step(x, top, total, ACCURATE)
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


# ---- few logits: one program computes the labels' sums, the losses and the gradient in one launch --------------------------


@triton.jit
def cross_entropy_single_program(
    x_ptr, target_ptr, weight_ptr, loss_ptr, dx_ptr, M, V, x_row, x_col, target_stride, weight_stride, dx_row, dx_col,
    ignore, smoothing, z, cap, HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr,
    GRADIENT: tl.constexpr, ACCURATE: tl.constexpr, LABELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss [] (the mean or the sum) and, with GRADIENT, dx [M, V]. LABELS, ROWS and BLOCK are powers of two: of M, of the rows
    at once and of V. Rows that are ignored are not read."""
    col = tl.arange(0, BLOCK)
    by_weight = 1.0
    by_number = 1.0
    if MEAN:
        of_all = labels_of(
            target_ptr, weight_ptr, target_ptr, tl.arange(0, LABELS).to(tl.int64), M, V, target_stride, weight_stride,
            ignore, HAS_WEIGHT, False, False,
        )  # fmt: skip
        by_number = tl.div_rn(1.0, tl.sum(tl.where(of_all[1], 1.0, 0.0), axis=0))
        by_weight = by_number
        if HAS_WEIGHT:
            by_weight = tl.div_rn(1.0, tl.sum(tl.where(of_all[1], of_all[2], 0.0), axis=0))
    all_weights = V * 1.0
    if HAS_WEIGHT and SMOOTH:
        w = tl.load(weight_ptr + col * weight_stride, mask=col < V, other=0.0).to(tl.float32)
        all_weights = tl.sum(w, axis=0)
    losses = tl.zeros([ROWS], tl.float32)
    for start in range(0, M, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        label, counts, weight, _, _, _ = labels_of(
            target_ptr, weight_ptr, target_ptr, row, M, V, target_stride, weight_stride, ignore, HAS_WEIGHT, False, False
        )  # fmt: skip
        inside = counts[:, None] & (col[None, :] < V)
        at = x_ptr + row[:, None] * x_row + col[None, :] * x_col
        x = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
        x_t = tl.load(x_ptr + row * x_row + label * x_col, mask=counts, other=0.0).to(tl.float32)
        x, x_t, top, e, total = row_sums(x, x_t, inside, cap, CAP, ACCURATE)
        lse = top + tl.log(total)
        weighted_sum = total
        if SMOOTH:
            weighted = x * w[None, :] if HAS_WEIGHT else x
            weighted_sum = tl.sum(tl.where(inside, weighted, 0.0), axis=1)
        loss = loss_of(lse, x_t, weighted_sum, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH)
        losses += tl.where(counts, loss, 0.0 * by_weight)  # NaN for the mean over no label
        if GRADIENT:
            of_p, spread, at_label = coefficients(
                lse, weight, by_weight, by_number, all_weights, V, smoothing, z, SMOOTH
            )
            g = gradient_of(
                e * tl.div_rn(1.0, total)[:, None], x, col[None, :], label[:, None], of_p[:, None], spread[:, None],
                at_label[:, None], weight_ptr, weight_stride, V, cap, HAS_WEIGHT, SMOOTH, CAP,
            )  # fmt: skip
            g = tl.where(counts[:, None], g, 0.0)
            at = dx_ptr + row[:, None] * dx_row + col[None, :] * dx_col
            tl.store(at, g.to(dx_ptr.dtype.element_ty), mask=(row[:, None] < M) & (col[None, :] < V))
    tl.store(loss_ptr, tl.sum(losses, axis=0).to(loss_ptr.dtype.element_ty))


# ---- sums over rows ----------------------------------------------------------------------------------------------------
#
# How many labels count and what they weigh (the mean's divisors), and the sum of the losses. Up to SLICE rows by one program;
# more by several, whose sums are then added, always in the same order.


@triton.jit
def sum_labels(
    target_ptr, weight_ptr, out_ptr, M, V, target_stride, weight_stride, ignore, m_each, v_each,
    HAS_WEIGHT: tl.constexpr, ALL_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[program] = (weights of the labels that count, their number, weights of all classes), each of a slice."""
    p = tl.program_id(0).to(tl.int64)
    weights = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.float32)
    everything = tl.zeros([BLOCK], tl.float32)
    for start in range(0, m_each, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = p * m_each + at
        inside = (at < m_each) & (row < M)
        label = tl.load(target_ptr + row * target_stride, mask=inside, other=ignore).to(tl.int64)
        counts = inside & (label != ignore)
        number += tl.where(counts, 1.0, 0.0)
        if HAS_WEIGHT:
            known = (label >= 0) & (label < V)
            w = tl.load(weight_ptr + label * weight_stride, mask=counts & known, other=0.0).to(tl.float32)
            weights += tl.where(counts, tl.where(known, w, float("nan")), 0.0)
    if ALL_WEIGHTS:
        for start in range(0, v_each, BLOCK):
            at = start + tl.arange(0, BLOCK)
            v = p * v_each + at
            inside = (at < v_each) & (v < V)
            everything += tl.load(weight_ptr + v * weight_stride, mask=inside, other=0.0).to(tl.float32)
    count = tl.sum(number, axis=0)
    tl.store(out_ptr + p * 3, tl.sum(weights, axis=0) if HAS_WEIGHT else count)
    tl.store(out_ptr + p * 3 + 1, count)
    tl.store(out_ptr + p * 3 + 2, tl.sum(everything, axis=0))


@triton.jit
def sum_slices(in_ptr, out_ptr, N, each, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """out[program, c] = sum of in[n, c] over a slice of N; c is the grid's second dimension."""
    p = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, each, BLOCK):
        at = start + tl.arange(0, BLOCK)
        n = p * each + at
        total += tl.load(in_ptr + n * COLUMNS + c, mask=(at < each) & (n < N), other=0.0)
    tl.store(out_ptr + p * COLUMNS + c, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


# Of a ``LossCall`` or ``GradientCall`` (dispatch.py). Without a weight, sums or gradient any tensor is passed for it.

SLICE = 16384  # rows that one program sums
SHORT_BESIDE = 64  # columns of rows that lie side by side, of which a program holds enough whole ones


class Sum:
    """Of the rows of fp32 [N, C] (or [N]) into [C] (or [])."""

    def __init__(self, n: int, columns: int = 1):
        p = parts(n)
        self.steps = [_slices(n, columns, p)] if p > 1 else []
        self.steps.append(_slices(p if p > 1 else n, columns, 1))
        self.partial = (p, columns)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        for step in self.steps[:-1]:
            partial = torch.empty(self.partial, device=x.device, dtype=torch.float32)
            step(x, partial)
            x = partial
        self.steps[-1](x, out)


class LabelSums:
    """Of ``(target, weight)``: fp32 [3]: the weights of the labels that count, their number, the weights of all classes."""

    def __init__(self, target: Tensor, weight: Tensor, classes: int, ignore: int, has_weight: bool, all_weights: bool):
        m = target.shape[0]
        self.parts = max(parts(m), parts(classes) if all_weights else 1)
        each = (triton.cdiv(m, self.parts), triton.cdiv(classes, self.parts))
        scalars = (m, classes, target.stride(0), weight.stride(0), ignore, *each)
        flags = {"HAS_WEIGHT": has_weight, "ALL_WEIGHTS": all_weights, "BLOCK": block_of(max(each[0], 1))}
        self.first = Plan(sum_labels, (self.parts,), scalars, flags, 4)
        self.rest = Sum(self.parts, 3)

    def __call__(self, target: Tensor, weight: Tensor) -> Tensor:
        total = torch.empty(3, device=target.device, dtype=torch.float32)
        if self.parts == 1:
            self.first(target, weight, total)
            return total
        sums = torch.empty((self.parts, 3), device=target.device, dtype=torch.float32)
        self.first(target, weight, sums)
        self.rest(sums, total)
        return total


def parts(n: int) -> int:
    return max(1, min(triton.cdiv(n, SLICE), 1024))


def block_of(n: int) -> int:
    return min(bucket(n, 128), 4096)


def _slices(n: int, columns: int, p: int) -> Plan:
    each = triton.cdiv(n, p)
    return Plan(sum_slices, (p, columns), (n, each), {"COLUMNS": columns, "BLOCK": block_of(each)}, 4)


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


def rows_scalars(c: Any) -> tuple[int | float, ...]:
    return c.m, c.v, *c.x.stride(), c.target.stride(0), c.w.stride(0), *c.dx.stride(), *c.numbers


def beside(c: Any) -> bool:
    """Whether rows of the logits or of their gradient lie side by side."""
    return side_by_side(c.x) or side_by_side(c.dx)


def long_beside(c: Any) -> bool:
    return c.v > SHORT_BESIDE and beside(c)


def launch_rows(c: Any) -> Plan:
    """Of ``(x, target, weight, sums, loss, stats, dx)``."""
    configured = with_gradient_configuration if c.at_once else loss_configuration
    config, kernels = configured(c.x.device, c.x.dtype, bucket(c.v)), (cross_entropy_rows, cross_entropy_long_rows)
    return row_programs.plan(kernels, config, c.m, c.v, rows_scalars(c), c.flags(GRADIENT=c.at_once))


def launch_gradient(c: Any) -> Plan:
    """Of ``(x, target, weight, sums, stats, dloss, dx)``; dloss is [M], or [] for the mean and the sum."""
    config = gradient_configuration(c.x.device, c.x.dtype, bucket(c.v))
    strides = (c.target.stride(0), c.w.stride(0), c.dloss_stride, *c.dx.stride())
    tile = {"ROWS": config["ROWS"], "BLOCK": min(config["BLOCK"], bucket(c.v))}
    grid = (triton.cdiv(c.m, tile["ROWS"]) * triton.cdiv(c.v, tile["BLOCK"]),)
    scalars = (c.m, c.v, *c.x.stride(), *strides, *c.numbers)
    return Plan(cross_entropy_gradient, grid, scalars, {**c.flags(), **tile}, config["num_warps"])


SINGLE_TILE = 256 if INTERPRETING else 8192  # logits that a single program holds at once
SINGLE_MOST = 16 * SINGLE_TILE if INTERPRETING else 4 * SINGLE_TILE  # its logits, rows and columns as powers of two
SINGLE_ROWS = 4096  # whose labels it holds at once


def launch_single_program(c: Any) -> Plan:
    """Of ``(x, target, weight, loss, dx)``."""
    rows = max(min(SINGLE_TILE // bucket(c.v), bucket(c.m)), 1)
    tile = {"LABELS": bucket(c.m), "ROWS": rows, "BLOCK": bucket(c.v)}
    warps = min(max(rows * bucket(c.v) // 512, 4), 16)  # up to 16 logits a thread
    return Plan(cross_entropy_single_program, (1,), rows_scalars(c), {**c.flags(GRADIENT=c.at_once), **tile}, warps)


SCALE_PROGRAMS = 4  # for each multiprocessor: few, since they mostly find that there is nothing to do


def launch_scale(x: Tensor, of: torch.dtype | None = None) -> Plan:
    """Of ``(factor, x)``, x [M, N]; a factor of another dtype than x's is ``of`` it, and has plans of its own."""
    (m, n), strides = (x.shape, x.stride()) if not x.is_contiguous() else ((1, x.numel()), (0, 1))
    block = min(bucket(n), 4096)
    grid = (min(m * triton.cdiv(n, block), SCALE_PROGRAMS * multiprocessors(x.device)),)
    return Plan(scale_unless_one, grid, (m, n, *strides), {"BLOCK": block}, 8)


scale_plans = Plans(launch_scale)
