"""The calls of cross entropy: as operators of ``torch.library`` for what traces, and with autograd for eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.operators.call import KernelFunction, on_gpu, reference_gradients
from weft.operators.loss.definition import gradient, reference
from weft.operators.loss.kernels import Options
from weft.operators.loss.launches import backward_plans, forward_plans, scale_plans

# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, stats, label sums), the last two for the gradient: ``launches.Forward``."""
    options = Options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if not on_gpu(logits) or not logits.numel():
        loss = reference(logits, target, weight=weight, **keywords(options))
        none = torch.empty((2, 0), device=logits.device, dtype=torch.float32)
        return loss, none, none.clone()
    return launch(logits, target, weight, None, options, "triton")


@torch.library.triton_op("weft::cross_entropy_backward", mutates_args=())
def backward_op(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    sums: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    reduction: str,
) -> Tensor:
    options = Options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if not on_gpu(logits) or not logits.numel():
        return gradient(dloss, logits, target, weight=weight, **keywords(options))[0]
    dx = torch.empty_like(logits)
    again(dloss, logits, target, weight, stats, sums, dx, options)
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options = inputs
    _, stats, sums = output
    ctx.save_for_backward(logits, target, weight, stats, sums)
    ctx.mark_non_differentiable(stats, sums)


def _backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx = torch.ops.weft.cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options)
    return dx, *[None] * 7


cross_entropy_op.register_autograd(_backward, setup_context=_save)

# ---- launches --------------------------------------------------------------------------------------------------------


def keywords(options: Options) -> dict[str, Any]:
    return {**vars(options), "soft_cap": options.soft_cap or None}


def launch(
    logits: Tensor, target: Tensor, weight: Tensor | None, dx: Tensor | None, options: Options, back_end: str
) -> tuple[Tensor, Tensor, Tensor]:
    w, out = logits if weight is None else weight, logits if dx is None else dx
    plans = forward_plans.of((logits, target, w, out), options, weight is not None, dx is not None, back_end)
    return plans(logits, target, w, out)


def again(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    sums: Tensor,
    dx: Tensor,
    options: Options,
    back_end: str = "triton",
) -> None:
    w = logits if weight is None else weight
    plan = backward_plans.of((logits, target, w, dloss, dx), options, weight is not None, back_end)
    plan(logits, target, w, sums, stats, dloss, dx)


class CrossEntropy(KernelFunction):
    """In eager mode. Where the gradient needs nothing that is known only later, it is made with the loss and kept; backward
    multiplies it by the loss's gradient on the device, unless that is 1. It is handed out once: whoever asks again (a retained
    graph) has it made again from the logits. What is known only later: each row's share (reduction "none"), and the loss
    scale, without which fp16 gradients would underflow."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: Options,
        back_end: str,
        wanted: bool,
        inplace: bool,
        ready: Any = None,
    ) -> Tensor:
        """``ready``: the launches, where they are known (``forward_plans``)."""
        ctx.options, ctx.inplace, ctx.back_end = options, inplace, back_end
        ctx.gradient = None
        if wanted and options.reduction != "none" and logits.dtype != torch.float16:
            ctx.gradient = logits if inplace else torch.empty_like(logits)
        if ready is None:
            loss, stats, sums = launch(logits, target, weight, ctx.gradient, options, back_end)
        else:
            dx = logits if ctx.gradient is None else ctx.gradient
            loss, stats, sums = ready(logits, target, logits if weight is None else weight, dx)
        if inplace and wanted:
            ctx.logits = logits
            ctx.save_for_backward(target, weight, stats, sums)
            if ctx.gradient is not None:
                torch.autograd.graph.increment_version(logits)  # whoever saved the logits must hear of it
        else:
            ctx.save_for_backward(target, weight, stats, sums, logits)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        target, weight, stats, sums, *kept = ctx.saved_tensors
        rest = (None,) * 7
        if kept and torch.is_grad_enabled():
            named = {"weight": weight, **keywords(ctx.options)}

            def loss_of(x: Tensor) -> Tensor:
                return reference(x, target, **named)

            return (*reference_gradients(loss_of, kept, (True,), (dloss,)), *rest)
        made, ctx.gradient = ctx.gradient, None
        if made is not None:
            scale_plans.of((made,))(dloss, made)
            ctx.logits = None
            return (made.detach(), *rest)
        if ctx.inplace:
            if ctx.logits is None:
                raise RuntimeError(
                    "cross_entropy: a second backward after inplace_backward=True, which wrote the gradient over 'logits'; "
                    "expected one backward, or inplace_backward=False"
                )
            logits, ctx.logits = ctx.logits, None
            dx = logits.detach()
            torch.autograd.graph.increment_version(logits)
        else:
            (logits,) = kept
            dx = torch.empty_like(logits)
        if stats is None:  # the one program that made the first gradient kept nothing for a second
            _, stats, sums = launch(logits, target, weight, None, ctx.options, "triton")
        again(dloss, logits, target, weight, stats, sums, dx, ctx.options, ctx.back_end)
        return (dx, *rest)
