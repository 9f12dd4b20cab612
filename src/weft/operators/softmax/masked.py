"""What causal and masked softmax share: the call with its gradient, and the checks."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Tolerance
from weft.operators.call import (
    Choice,
    KernelFunction,
    check_tensor,
    on_gpu,
    readable,
    reference_gradients,
    rows_of,
    traced,
)
from weft.operators.launch import Plans
from weft.operators.row_programs import ONE_PASS
from weft.operators.softmax import masked_rows
from weft.operators.softmax.masked_kernels import CAUSAL


class MaskedSoftmax(KernelFunction):
    """``plans`` make the launches, of forward and of backward. ``reference(x)`` is the same in PyTorch; its autograd serves
    where a gradient of the gradient is wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor, scale: float, kind: str, plans: tuple[Plans, Plans],
        reference: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        y = torch.empty_like(x)
        forward, ctx.backward_plans = plans
        if y.numel():
            forward.of((x, mask), scale, kind)(x, mask, y)
        ctx.save_for_backward(y, x)
        ctx.scale, ctx.causal, ctx.reference = scale, kind == CAUSAL, reference
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, x = ctx.saved_tensors
        rest = (None,) * 5
        if torch.is_grad_enabled():
            return *reference_gradients(ctx.reference, (x,), (True,), (dy,)), *rest
        dx = torch.empty_like(y)
        if dx.numel():
            dy = readable(dy, y)
            ctx.backward_plans.of((y, dy), ctx.scale, ctx.causal)(y, dy, dx)
        return (dx, *rest)


def tolerance(reference: Callable[..., Tensor]) -> dict[str, Tolerance]:
    """Forward: a score is rounded before its exponential is taken, which costs half an ulp for each unit of the score.
    Backward: dx is a difference that vanishes where one column holds all the weight, so errors are relative to its terms: to
    the root of their squares' mean over the columns that a row sees. Those it does not see have none."""

    def terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
        (dy,), y = gradients, reference(**arguments)
        each = arguments["scale"] * y * (dy.abs() + (y * dy.abs()).sum(-1, keepdim=True))
        seen = (each != 0).sum(-1, keepdim=True).clamp(min=1)
        return [(each.square().sum(-1, keepdim=True) / seen).sqrt()]

    return {"forward": Tolerance(scale="element", ulps=2.0), "backward": Tolerance(scale=terms, terms=lambda w: 32)}


LARGEST = torch.finfo(torch.float32).max


def check(operator: str, x: Tensor, scale: float, least: int) -> None:
    """Raises TypeError or ValueError unless x is a floating tensor of ``least`` dimensions and scale a number."""
    check_tensor(operator, "x", x)
    if x.ndim < least:
        shape = "[..., S, T]" if least == 2 else "[..., N]"
        raise ValueError(f"{operator}: argument 'x' has shape {tuple(x.shape)}; expected {shape}")
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not -LARGEST <= scale <= LARGEST:
        raise ValueError(f"{operator}: argument 'scale' is {scale!r:.40}; expected a number that fp32 can hold")


def choose(x: Tensor, mask: Tensor | None = None) -> Choice:
    """For x, and for a mask of its shape (expanded) if there is one; checked already."""
    if not on_gpu(x):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if traced(*(t for t in (x, mask) if t is not None)):
        return Choice("torch", "traced: PyTorch's own operators, which a compiler fuses with their neighbours")
    if not x.numel():
        return Choice("torch", "empty: nothing to launch")
    like = torch.empty_like(x, device="meta")
    if rows_of(x) is None or rows_of(like) is None:
        return Choice("torch", "the leading dimensions do not collapse into rows of one stride: a copy would be needed")
    n = x.shape[-1]
    if masked_rows.measured(x):
        added = mask is not None and mask.dtype != torch.bool
        reason = masked_rows.why_not(masked_rows.longest(x.dtype, added), x, like)
        if not reason and (mask is None or not masked_rows.why_not_mask(mask, x)):
            return Choice("cuda", f"{n} columns: a block holds a row in registers")
    return Choice("triton", f"{n} columns: " + ("held in registers" if n <= ONE_PASS else "read twice"))
