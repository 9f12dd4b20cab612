"""What a compiler sees of ``cross_entropy`` over a long vocabulary on Hopper: ``torch.ops.weft.long_cross_entropy`` and its
gradient. Each is one operator whose kernel is chosen when it runs: those for long rows are CUDA C++, which takes half the time
of the Triton kernel that a compiler can look into."""

from typing import Any

import torch
from torch import Tensor

from weft.operators.call import on_gpu
from weft.operators.loss.dispatch import BACKWARD, ROWS
from weft.operators.loss.reference import Options, gradient, reference

# M rows, V classes


def asked(numbers: tuple[Any, ...]) -> Options:
    """Of plain numbers, 0 for no ``soft_cap``."""
    ignore_index, label_smoothing, z_loss, soft_cap, reduction = numbers
    return Options(int(ignore_index), float(label_smoothing), float(z_loss), float(soft_cap) or None, reduction)


def results(logits: Tensor, weight: Tensor | None, o: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Empty ones: the loss, each row's maximum and sum of exponentials [2, M], and the label sums, as ``dispatch.Forward``."""
    summed = o.reduction == "mean" or (weight is not None and o.label_smoothing > 0)
    loss = logits.new_empty(logits.shape[0] if o.reduction == "none" else ())
    stats, sums = (logits.new_empty(n, dtype=torch.float32) for n in ((2, logits.shape[0]), (3 * summed,)))
    return loss, stats, sums


@torch.library.custom_op("weft::long_cross_entropy", mutates_args=())
def loss_op(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    soft_cap: float, reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, stats, label sums), the last two for the gradient."""
    o = asked((ignore_index, label_smoothing, z_loss, soft_cap, reduction))
    if not on_gpu(logits) or not logits.numel():
        _, stats, sums = results(logits, weight, o)
        return reference(logits, target, weight=weight, **o._asdict()), stats.zero_(), sums.zero_()
    tensors = (logits, target) if weight is None else (logits, target, weight)
    plan = ROWS.of(tensors, *o, False, False)
    found: tuple[Tensor, Tensor, Tensor] = plan(logits, target, logits if weight is None else weight, logits)
    return found


@loss_op.register_fake
def _(logits: Tensor, target: Tensor, weight: Tensor | None, *numbers: Any) -> tuple[Tensor, Tensor, Tensor]:
    return results(logits, weight, asked(numbers))


@torch.library.custom_op("weft::long_cross_entropy_backward", mutates_args=())
def backward_op(
    dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, sums: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, soft_cap: float, reduction: str,
) -> Tensor:  # fmt: skip
    o = asked((ignore_index, label_smoothing, z_loss, soft_cap, reduction))
    if not on_gpu(logits) or not logits.numel():
        made = gradient(dloss, logits, target, weight=weight, **o._asdict())[0]
        return torch.empty_like(logits).copy_(made)
    dx, w = torch.empty_like(logits), logits if weight is None else weight
    plan = BACKWARD.of((logits, target, w, dloss, dx), o, weight is not None)
    plan(logits, target, w, sums if sums.numel() else stats, stats, dloss, dx)
    return dx


@backward_op.register_fake
def _(dloss: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.numbers = inputs
    ctx.save_for_backward(logits, target, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return backward_op(dloss, *ctx.saved_tensors, *ctx.numbers), *[None] * 7


loss_op.register_autograd(_backward, setup_context=_save)


def by_operator(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, soft_cap: float | None = None, **options: Any
) -> Tensor:
    weight = None if weight is None else weight.detach()
    loss: Tensor = loss_op(logits, target, weight, *Options(soft_cap=soft_cap or 0.0, **options))[0]
    return loss
