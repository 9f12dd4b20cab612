"""``linear_cross_entropy_with_gradient(x, weight, target)``: the loss and its gradients from one call, without autograd.

What a training step pays for its head: three products of 2·T·D·V operations. It is also what timing "forward and backward"
of linear cross entropy means, with its memory: peers run both inside the call.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Operator, Tolerance, Workload
from weft.operators import mutants
from weft.operators.call import Choice, cast_for_products, guarded, traced
from weft.operators.loss import linear_cross_entropy as linear
from weft.operators.loss.dispatch import LINEAR_WITH_GRADIENT, LinearCall, linear_call
from weft.operators.loss.linear_chunks import loss_and_gradients
from weft.operators.loss.reference import Options
from weft.operators.loss.with_gradients import register_peers, traceable_with_gradients, with_gradients, wrong_in_parts

All = tuple[Tensor, Tensor, Tensor, Tensor | None]


def both(function: Callable[..., Tensor]) -> Callable[..., All]:
    """Loss and gradients by autograd."""
    return functools.partial(with_gradients, linear.LEAVES, function)


def chunked(call: LinearCall) -> All:
    with torch.no_grad():
        loss, (dx, dweight, dbias) = loss_and_gradients(linear.launchable(call), (True, True, call.bias is not None))
    return loss, dx, dweight, dbias  # type: ignore[return-value]


def cost(w: Workload, direction: str) -> Cost:
    return linear.cost_of(w, 3, True)


def _present(**arguments: Any) -> tuple[Tensor, ...]:
    return tuple(o for o in both(linear.reference)(**arguments) if o is not None)


linear_cross_entropy_with_gradient = Operator(
    name="linear_cross_entropy_with_gradient",
    axes={"T": "tokens", "D": "hidden size", "V": "classes"},
    inputs=linear.inputs,
    reference=both(linear.reference),
    cost=cost,
    options=linear.OPTIONS,
    tolerance=Tolerance(scale="row", ulps=2.0, eps=linear.epsilon, terms=lambda w: max(w.axes.values())),
    workloads=linear.few_workloads(),
    mutants=[
        *mutants.usual(_present),
        *wrong_in_parts(
            both(linear.reference), {name: both(function) for name, function in linear.WRONG.items()}, "gradients"
        ),
    ],
)


@linear_cross_entropy_with_gradient.implementation("chunked", backend="triton", arch=">=sm_80")
def by_chunks(x: Tensor, weight: Tensor, target: Tensor, **named: Any) -> All:
    return chunked(linear_call(x, weight, target, **named))


PEERS = {"composed": linear.composed, "liger": linear.liger, "quack": linear.quack}
register_peers(linear_cross_entropy_with_gradient, linear.LEAVES, **PEERS)


@linear_cross_entropy_with_gradient.choice
@guarded
def choose(x: Tensor, weight: Tensor, target: Tensor, *, check_labels: bool = False, **named: Any) -> Choice:
    call = linear_call(x, weight, target, **named)
    return LINEAR_WITH_GRADIENT.choose("linear_cross_entropy_with_gradient", call, check_labels)


@linear_cross_entropy_with_gradient.function
def linear_cross_entropy_with_gradient_function(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float | None = None,
    reduction: str = "mean", chunk_rows: int | None = None, accumulate: dtype | None = None,
    check_labels: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Cross entropy of a linear layer's logits and its gradients, from one call.

    Args:
        All are those of ``linear_cross_entropy``.

    Returns:
        The loss as ``linear_cross_entropy`` gives it, and its gradients by x [T, D], weight [V, D] and bias [V] (None
        without one), in their dtypes; with the reduction "none" those of the losses' sum. Nothing is tracked by autograd.
        Multiply float16 losses before differentiating: their gradients may underflow here, where nothing scales them.

    Raises:
        TypeError, ValueError: as ``linear_cross_entropy``.
    """
    given = x, weight, bias
    x, weight, bias = cast_for_products(x, weight, bias)
    options = Options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)._asdict()
    named = {"bias": bias, "class_weight": class_weight, "chunk_rows": chunk_rows, "accumulate": accumulate, **options}
    chosen = choose(x, weight, target, check_labels=check_labels, **named).implementation
    x, weight = x.detach(), weight.detach()
    if chosen == "torch":
        named |= {"x": x, "weight": weight, "target": target}
        by = traceable_with_gradients if traced(x, weight, target) else with_gradients
        loss, *found = by(linear.LEAVES, linear.reference, **named)
    else:
        loss, *found = chunked(linear_call(x, weight, target, **named))
    dx, dweight, dbias = (t if t is None or of is None else t.to(of.dtype) for t, of in zip(found, given, strict=True))
    return loss, dx, dweight, dbias
