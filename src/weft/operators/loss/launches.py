"""What one call of cross entropy launches, decided once for tensors of given shapes, strides and alignment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.operators.launch import Plans, multiprocessors
from weft.operators.loss import cluster, kernels
from weft.operators.loss.kernels import Options
from weft.operators.loss.label_sums import LabelSums, Sum
from weft.operators.loss.one_program import OneProgram

SCALE_PROGRAMS = 4  # for each multiprocessor: few, since they mostly find that there is nothing to do


class Forward:
    """Of ``(x, target, weight, dx)``: the loss; each row's maximum and sum of exponentials (stats, fp32 [2, M]); and the label
    sums (an empty tensor where nothing needs them). The gradient goes into dx where one is wanted; weight and dx are x itself
    where there are none."""

    def __init__(
        self, x: Tensor, target: Tensor, weight: Tensor, dx: Tensor, options: Options, has_weight: bool, gradient: bool,
        back_end: str,
    ):  # fmt: skip
        self.sums, self.total = None, None
        all_weights = has_weight and options.label_smoothing > 0
        if options.reduction == "mean" or all_weights:
            self.sums = LabelSums(target, weight, x.shape[1], options.ignore_index, has_weight, all_weights)
        if options.reduction != "none":
            self.total = Sum(x.shape[0])
        plan = {"triton": kernels.rows_plan, "cuda": cluster.plan}[back_end]
        self.rows: Any = plan(x, target, weight, dx, options, has_weight, gradient)

    def __call__(self, x: Tensor, target: Tensor, weight: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
        stats = torch.empty((2, x.shape[0]), device=x.device, dtype=torch.float32)
        sums = torch.empty(0, device=x.device, dtype=torch.float32) if self.sums is None else self.sums(target, weight)
        self.rows(x, target, weight, sums if self.sums else stats, loss, stats, dx)
        if self.total is not None:
            total = torch.empty((), device=x.device, dtype=x.dtype)
            self.total(loss, total)
            loss = total
        return loss if loss.dtype == x.dtype else loss.to(x.dtype), stats, sums


class Backward:
    """Of ``(x, target, weight, sums, stats, dloss, dx)``: the gradient into dx, by a second look at the logits."""

    def __init__(
        self, x: Tensor, target: Tensor, weight: Tensor, dloss: Tensor, dx: Tensor, options: Options, has_weight: bool,
        back_end: str = "triton",
    ):  # fmt: skip
        plan: Any = cluster.gradient_plan if back_end == "cuda" else kernels.gradient_plan
        self.plan = plan(x, target, weight, dloss, dx, options, has_weight)

    def __call__(
        self, x: Tensor, target: Tensor, weight: Tensor, sums: Tensor, stats: Tensor, dloss: Tensor, dx: Tensor
    ) -> None:
        self.plan(x, target, weight, sums if sums.numel() else stats, stats, dloss, dx)


def forward(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    dx: Tensor,
    options: Options,
    has_weight: bool,
    gradient: bool,
    back_end: str,
) -> Any:
    """What calculates the loss: the launches of a back end."""
    if back_end == "one_program":
        return OneProgram(x, target, weight, dx, options, has_weight, gradient)
    return Forward(x, target, weight, dx, options, has_weight, gradient, back_end)


forward_plans = Plans(forward)
backward_plans = Plans(Backward)
scale_plans = Plans(lambda x: kernels.scale_plan(x, SCALE_PROGRAMS * multiprocessors(x.device)))
