"""What a compiler sees of ``linear_cross_entropy``: ``torch.ops.weft.linear_cross_entropy``, one operator that gives the loss
and its gradients, so that logits are never all in memory. Inductor, which sees products and a softmax, holds all of them."""

from typing import Any

import torch
from torch import Tensor, dtype

from weft.operators.loss.dispatch import LinearCall
from weft.operators.loss.linear_chunks import loss_and_gradients
from weft.operators.loss.reference import Options

# T tokens, D width, V classes


@torch.library.custom_op("weft::linear_cross_entropy", mutates_args=())
def loss_op(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, soft_cap: float | None, reduction: str, chunk_rows: int | None,
    accumulate: dtype | None, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss and the ``wanted`` gradients by x, weight and bias; empty ones for the others."""
    options = Options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    call = LinearCall(x, weight, target, bias, class_weight, options, chunk_rows, accumulate)
    loss, found = loss_and_gradients(call, tuple(wanted))
    dx, dweight, dbias = (x.new_empty(0) if t is None else t.contiguous() for t in found)
    return loss, dx, dweight, dbias


@loss_op.register_fake
def _(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    leaves = (x, weight, weight if bias is None else bias)
    gradients = (x.new_empty(t.shape if w else 0) for t, w in zip(leaves, rest[-1], strict=True))
    return x.new_empty((), dtype=torch.float32), *gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])  # compilers have no second derivatives


def _backward(ctx: Any, dloss: Tensor, *rest: Any) -> tuple[Any, ...]:
    x, weight, _, bias, *_ = ctx.needs_input_grad
    dx, dweight, dbias = (g * dloss if w else None for g, w in zip(ctx.saved_tensors, (x, weight, bias), strict=True))
    return (dx, dweight, None, dbias, *(None,) * 9)


loss_op.register_autograd(_backward, setup_context=_save)


def by_operator(c: LinearCall) -> Tensor:
    leaves = (c.x, c.weight, c.bias)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in leaves]
    loss: Tensor = loss_op(
        c.x, c.weight, c.target, c.bias, c.class_weight, *c.options, c.chunk_rows, c.accumulate, wanted
    )[0]
    return loss
