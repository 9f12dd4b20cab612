"""Cross entropy of few logits by one program: the labels' sums, the loss and its gradient in one launch.

For few logits three launches and their buffers (``launches.Forward``) are what a call costs. Formulas: kernels.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import bucket
from weft.operators.launch import INTERPRETING, Plan
from weft.operators.loss.kernels import Options, capped, coefficients, exponential, gradient_of, labels_of, loss_of

TILE = 256 if INTERPRETING else 8192  # logits that the program holds at once
MOST = 16 * TILE if INTERPRETING else 4 * TILE  # logits, with rows and columns counted as powers of two
MOST_ROWS = 4096  # whose labels it holds at once


@triton.jit
def cross_entropy_one_program(
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
            target_ptr,
            weight_ptr,
            target_ptr,
            row,
            M,
            V,
            target_stride,
            weight_stride,
            ignore,
            HAS_WEIGHT,
            False,
            False,
        )
        inside = counts[:, None] & (col[None, :] < V)
        at = x_ptr + row[:, None] * x_row + col[None, :] * x_col
        x = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
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
                weighted_sum = tl.sum(tl.where(inside, x * w[None, :], 0.0), axis=1)
            else:
                weighted_sum = tl.sum(tl.where(inside, x, 0.0), axis=1)
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


def why_not(x: Tensor, options: Options, wanted: bool) -> str:
    """Why one program does not take the call (an empty string when it does); ``wanted``: a gradient is."""
    m, v = x.shape
    if options.reduction == "none":
        return "each row's loss: one launch without a sum makes them"
    if wanted and x.dtype == torch.float16:
        return "a gradient in float16, which waits for the loss's"
    if bucket(m) > MOST_ROWS or bucket(v) > TILE or bucket(m) * bucket(v) > MOST:
        return f"{m} rows of {v}: more than one program reads in a few steps"
    return ""


class OneProgram:
    """As ``launches.Forward``, but for a mean or sum alone: of ``(x, target, weight, dx)`` the loss, and nothing (None) of
    what each row's gradient would need."""

    def __init__(
        self, x: Tensor, target: Tensor, weight: Tensor, dx: Tensor, options: Options, has_weight: bool, gradient: bool
    ):
        m, v = x.shape
        rows = max(min(TILE // bucket(v), bucket(m)), 1)
        constants = {
            "HAS_WEIGHT": has_weight,
            "MEAN": options.reduction == "mean",
            "SMOOTH": options.label_smoothing > 0,
            "CAP": options.soft_cap > 0,
            "GRADIENT": gradient,
            "ACCURATE": x.dtype == torch.float32,
            "LABELS": bucket(m),
            "ROWS": rows,
            "BLOCK": bucket(v),
        }
        floats = (float(options.label_smoothing), float(options.z_loss), float(options.soft_cap))
        strides = (*x.stride(), target.stride(0), weight.stride(0), *dx.stride())
        warps = min(max(rows * bucket(v) // 512, 4), 16)  # up to 16 logits a thread
        scalars = (m, v, *strides, options.ignore_index, *floats)
        self.plan = Plan(cross_entropy_one_program, (1,), scalars, constants, warps)

    def __call__(self, x: Tensor, target: Tensor, weight: Tensor, dx: Tensor) -> tuple[Tensor, Any, Any]:
        loss = x.new_empty(())
        self.plan(x, target, weight, loss, dx)
        return loss, None, None
