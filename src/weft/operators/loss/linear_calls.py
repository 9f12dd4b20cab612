"""The calls of linear cross entropy: what they take, and autograd in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import FLOATS, KernelFunction, check_device, check_same, check_tensor, reference_gradients
from weft.operators.loss.arguments import check as check_options
from weft.operators.loss.kernels import Options
from weft.operators.loss.launches import scale_plans
from weft.operators.loss.linear_chunks import Call, chunk_rows, gradients_of_losses, loss_and_gradients
from weft.operators.loss.linear_definition import reference
from weft.operators.loss.linear_kernels import loss_plans
from weft.operators.matmul.dispatch import default_precision


def check(
    name: str, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    soft_cap: float | None, asked: Options, chunk: int | None, accumulate: torch.dtype | None, check_labels: bool,
) -> None:  # fmt: skip
    check_tensor(name, "x", x)
    check_tensor(name, "weight", weight)
    check_same(name, "weight", weight, "x", x)
    check_tensor(name, "target", target, (torch.int64, torch.int32))
    check_device(name, "target", target, "x", x)
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: arguments 'x' and 'weight' have shapes {tuple(x.shape)} and {tuple(weight.shape)}; expected [T, D] and "
            "[V, D] (flatten leading dimensions)"
        )
    if target.shape != x.shape[:1]:
        raise ValueError(
            f"{name}: argument 'target' has shape {tuple(target.shape)}; expected ({x.shape[0]},), a label for each row of 'x'"
        )
    for named, value, dtypes in (
        ("bias", bias, (x.dtype,)),
        ("class_weight", class_weight, tuple(dict.fromkeys((x.dtype, *FLOATS[:1])))),
    ):
        if value is None:
            continue
        check_tensor(name, named, value, dtypes)
        check_device(name, named, value, "x", x)
        if value.shape != weight.shape[:1]:
            raise ValueError(
                f"{name}: argument '{named}' has shape {tuple(value.shape)}; expected ({weight.shape[0]},), one for each class "
                f"of 'weight' {tuple(weight.shape)}"
            )
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError(
            f"{name}: argument 'class_weight' wants a gradient, which there is none of; expected a constant"
        )
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(
            f"{name}: argument 'chunk_rows' is {chunk!r}; expected a number of tokens, at least 1, or None"
        )
    if accumulate not in (None, x.dtype, torch.float32):
        allowed = ", ".join(map(str, dict.fromkeys((x.dtype, torch.float32))))
        raise ValueError(f"{name}: argument 'accumulate' is {accumulate!r:.40}; expected {allowed} or None")
    logits = x.detach().new_empty(()).expand(x.shape[0], weight.shape[0])  # for its shape
    check_options(name, logits, target, None, soft_cap, asked, check_labels)


def under_autocast(x: Tensor) -> bool:
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def as_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: torch.dtype | None
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What a call becomes under autocast: operands as it casts those of a linear layer, a loss in fp32."""
    if not under_autocast(x):
        return x, weight, {"bias": bias, "accumulate": accumulate}
    half = torch.get_autocast_dtype("cuda")
    kept = accumulate if accumulate in (None, torch.float32) else half
    more = {"bias": None if bias is None else bias.to(half), "accumulate": kept, "loss_dtype": torch.float32}
    return x.to(half), weight.to(half), more


def call_of(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    soft_cap: float | None = None, chunk_rows_asked: int | None = None, accumulate: torch.dtype | None = None,
    loss_dtype: torch.dtype | None = None, **options: Any,
) -> Call:  # fmt: skip
    """Raises Declined where there is nothing to launch."""
    if not x.numel() or not weight.numel():
        raise Declined("empty: nothing to launch")
    rows = chunk_rows(x.shape[0], weight.shape[0], x.element_size(), chunk_rows_asked)
    asked = Options(soft_cap=soft_cap or 0.0, **options)
    return Call(x, weight, bias, target, class_weight, asked, rows, accumulate, loss_dtype or x.dtype)


def loss_alone(call: Call) -> Tensor:
    """Without a logit in memory."""
    x, weight, target = call.x, call.weight, call.target
    bias, of_class = x if call.bias is None else call.bias, call.stand_in
    has = (call.bias is not None, call.of_class is not None)
    plan = loss_plans.of((x, weight, bias, target, of_class), call.options, *has, default_precision(), call.loss_dtype)
    loss: Tensor = plan(x, weight, bias, target, of_class)
    return loss


class LinearCrossEntropy(KernelFunction):
    """In eager mode. With ``at_once`` the gradients are made with the loss and kept; backward multiplies them by the loss's
    gradient on the device, unless that is 1, and hands them out once: whoever asks again (a retained graph) has them made
    again. Else they are made in backward, from logits that are made again: one product more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call, at_once: bool) -> Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        ctx.kept = None
        ctx.at_once = at_once
        if at_once and any(wanted) and call.options.reduction == "none":
            raise Declined("each row's factor comes only in backward: gradients cannot be made with the losses")
        ctx.rest = (call.options, call.rows, call.accumulate, call.loss_dtype)
        if at_once:
            loss, ctx.kept = loss_and_gradients(call, wanted)
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
            named = {**vars(options), "soft_cap": options.soft_cap or None, "class_weight": of_class}

            def loss_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return reference(x, weight, target, bias=bias, **named)

            return (*reference_gradients(loss_of, (x, weight, bias), wanted, (dloss.to(x.dtype),)), None, None)
        call = Call(x, weight, bias, target, of_class, options, *rest)
        if not ctx.at_once:
            return (*gradients_of_losses(call, dloss, wanted), None, None)
        made, ctx.kept = ctx.kept, None
        if made is None:
            made = loss_and_gradients(call, wanted)[1]
        for gradient in made:
            if gradient is not None:
                scale_plans.of((gradient,))(dloss, gradient)
        return (*made, None, None)
