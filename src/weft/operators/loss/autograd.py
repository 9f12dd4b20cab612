"""Cross entropy as operators of ``torch.library``, for what traces, and with autograd in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import KernelFunction, on_gpu, reference_gradients
from weft.operators.launch import Plans
from weft.operators.loss import linear_reference, reference
from weft.operators.loss.dispatch import BACKWARD, FORWARD, Forward, under_autocast
from weft.operators.loss.kernels import scale_plans
from weft.operators.loss.linear_chunks import ChunkedCall, gradients_of_losses, loss_and_gradients
from weft.operators.loss.linear_statistics import loss_plans
from weft.operators.loss.reference import Options
from weft.operators.matmul.dispatch import default_precision


def keywords(options: Options) -> dict[str, Any]:
    return {**vars(options), "soft_cap": options.soft_cap or None}


def as_options(ignore_index: int, label_smoothing: float, z_loss: float, soft_cap: float, reduction: str) -> Options:
    """Of plain numbers: a compiler that traces may pass symbolic ones."""
    return Options(int(ignore_index), float(label_smoothing), float(z_loss), float(soft_cap), reduction)


# ---- operators of torch.library ------------------------------------------------------------------------------------------


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
    """(loss, stats, label sums), the last two for the gradient: ``dispatch.Forward``."""
    options = as_options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if not on_gpu(logits) or not logits.numel():
        loss = reference.reference(logits, target, weight=weight, **keywords(options))
        none = torch.empty((2, 0), device=logits.device, dtype=torch.float32)
        return loss, none, none.clone()
    return launch(FORWARD.kernel("triton"), logits, target, weight, options)


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
    options = as_options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if not on_gpu(logits) or not logits.numel():
        return reference.gradient(dloss, logits, target, weight=weight, **keywords(options))[0]
    dx = torch.empty_like(logits)
    launch_backward(BACKWARD.kernel("triton"), dloss, logits, target, weight, (stats, sums), dx, options)
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

# ---- launches ----------------------------------------------------------------------------------------------------------------


def launch(
    plans: Plans, logits: Tensor, target: Tensor, weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, stats, label sums), without a gradient."""
    tensors = (logits, target) if weight is None else (logits, target, weight.detach())
    plan = plans.of(tensors, *keywords(options).values(), False, False)
    return plan(logits, target, logits if weight is None else weight, logits)


def launch_backward(
    plans: Plans,
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    saved: tuple[Tensor, Tensor],
    dx: Tensor,
    options: Options,
) -> None:
    """``saved``: the statistics and the labels' sums."""
    w, (stats, sums) = logits if weight is None else weight, saved
    plan = plans.of((logits, target, w, dloss, dx), options, weight is not None)
    plan(logits, target, w, sums if sums.numel() else stats, stats, dloss, dx)


# ---- autograd in eager mode --------------------------------------------------------------------------------------------------


class CrossEntropy(KernelFunction):
    """With ``plan.at_once`` the gradient is made with the loss and saved; backward multiplies it by the loss's gradient on the
    device, unless that is 1. It is returned once: a second backward (a retained graph) computes it again from the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, plan: Forward, backward: Plans, inplace: bool
    ) -> Tensor:
        ctx.options, ctx.inplace, ctx.backward_plans = plan.options, inplace, backward
        ctx.gradient = None
        if plan.at_once:
            ctx.gradient = logits if inplace else torch.empty_like(logits)
        dx = logits if ctx.gradient is None else ctx.gradient
        loss, stats, sums = plan(logits, target, logits if weight is None else weight, dx)
        if inplace and plan.wanted:
            ctx.logits = logits
            ctx.save_for_backward(target, weight, stats, sums)
            if ctx.gradient is not None:
                torch.autograd.graph.increment_version(logits)  # autograd must know that saved logits are overwritten
        else:
            ctx.save_for_backward(target, weight, stats, sums, logits)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        target, weight, stats, sums, *saved = ctx.saved_tensors
        rest = (None,) * 5
        if saved and torch.is_grad_enabled():
            named = {"weight": weight, **keywords(ctx.options)}

            def loss_of(x: Tensor) -> Tensor:
                return reference.reference(x, target, **named)

            return (*reference_gradients(loss_of, saved, (True,), (dloss,)), *rest)
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
            (logits,) = saved
            dx = torch.empty_like(logits)
        if stats is None:  # a single program saves nothing for a second gradient
            _, stats, sums = launch(FORWARD.kernel("triton"), logits, target, weight, ctx.options)
        launch_backward(ctx.backward_plans, dloss, logits, target, weight, (stats, sums), dx, ctx.options)
        return (dx, *rest)


def as_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: torch.dtype | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What a call of linear cross entropy becomes under autocast: operands as it casts those of a linear layer, a loss in
    fp32."""
    if not under_autocast(x):
        return x, weight, {"bias": bias, "accumulate": accumulate}
    half = torch.get_autocast_dtype("cuda")
    dtype = accumulate if accumulate in (None, torch.float32) else half
    more = {"bias": None if bias is None else bias.to(half), "accumulate": dtype, "loss_dtype": torch.float32}
    return x.to(half), weight.to(half), more


def loss_alone(call: ChunkedCall) -> Tensor:
    """Without a logit in memory."""
    x, weight, target = call.x, call.weight, call.target
    bias, of_class = x if call.bias is None else call.bias, call.w
    has = (call.bias is not None, call.of_class is not None)
    plan = loss_plans.of((x, weight, bias, target, of_class), call.options, *has, default_precision(), call.loss_dtype)
    return plan(x, weight, bias, target, of_class)


class LinearCrossEntropy(KernelFunction):
    """With ``at_once`` the gradients are made with the loss and saved; backward multiplies them by the loss's gradient on the
    device, unless that is 1, and returns them once: a second backward (a retained graph) computes them again. Else they are
    computed in backward, from logits that are computed again: one product more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: ChunkedCall, at_once: bool) -> Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        ctx.made = None
        ctx.at_once = at_once
        if at_once and any(wanted) and call.options.reduction == "none":
            raise Declined("each row's factor comes only in backward: gradients cannot be made with the losses")
        ctx.rest = (call.options, call.rows, call.accumulate, call.loss_dtype)
        if at_once:
            loss, ctx.made = loss_and_gradients(call, wanted)
        else:
            loss = loss_alone(call)
        ctx.save_for_backward(x, weight, bias, call.target, call.of_class)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target, of_class = ctx.saved_tensors
        options, *rest = ctx.rest
        wanted = tuple(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            named = {**keywords(options), "class_weight": of_class}

            def loss_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return linear_reference.reference(x, weight, target, bias=bias, **named)

            return (*reference_gradients(loss_of, (x, weight, bias), wanted, (dloss.to(x.dtype),)), None, None)
        call = ChunkedCall(x, weight, bias, target, of_class, options, *rest)
        if not ctx.at_once:
            return (*gradients_of_losses(call, dloss, wanted), None, None)
        made, ctx.made = ctx.made, None
        if made is None:
            made = loss_and_gradients(call, wanted)[1]
        for gradient in made:
            if gradient is not None:
                scale_plans.of((gradient,))(dloss, gradient)
        return (*made, None, None)
