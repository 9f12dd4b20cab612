"""``cross_entropy_with_gradient(logits, target)``: the loss and its gradient from one call, without autograd.

What a training step pays for its loss: the logits are read once and the gradient is written once. It is also what timing
"forward and backward" of cross entropy means: peers run both inside the call.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Operator, Tolerance, Workload
from weft.operators import mutants
from weft.operators.call import Choice, guarded
from weft.operators.launch import Plans
from weft.operators.loss import cross_entropy as loss
from weft.operators.loss.dispatch import WITH_GRADIENT, check_range, classes_of, in_fp32, in_rows, losses_shape
from weft.operators.loss.reference import OPTIONS, WRONG, Options, composed, inputs, reference, workloads
from weft.operators.loss.with_gradients import register_peers, traceable_with_gradients, with_gradients, wrong_in_parts

Pair = tuple[Tensor, Tensor]

LEAVES = ("logits",)
reference_pair = functools.partial(traceable_with_gradients, LEAVES, reference)


def by_autograd(function: Callable[..., Tensor]) -> Callable[..., Pair]:
    """Forward and backward, both within the call."""
    return functools.partial(with_gradients, LEAVES, function)


def launched(plans: Plans, logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **options: Any) -> Pair:
    if not logits.numel():
        raise Declined("empty: nothing to launch")
    logits, dx = logits.detach(), torch.empty_like(logits)
    tensors = (logits, target) if weight is None else (logits, target, weight)
    plan = plans.of(tensors, *Options(**options), True, False)
    return plan(logits, target, logits if weight is None else weight, dx)[0], dx


def cost(w: Workload, direction: str) -> Cost:
    forward, backward = loss.cost(w, "forward"), loss.cost(w, "backward")
    return Cost(
        reads=forward.reads,
        writes=forward.writes + backward.writes,
        vector_flops=forward.vector_flops + backward.vector_flops,
        special_ops=forward.special_ops,
    )


cross_entropy_with_gradient = Operator(
    name="cross_entropy_with_gradient",
    axes={"M": "rows", "V": "classes"},
    inputs=inputs,
    reference=reference_pair,
    cost=cost,
    options=OPTIONS,
    tolerance=Tolerance(scale="row", ulps=2.0, terms=lambda w: 32),
    workloads=workloads(),
    mutants=[
        *mutants.usual(reference_pair),
        *wrong_in_parts(reference_pair, {name: by_autograd(function) for name, function in WRONG.items()}, "gradient"),
    ],
)

for kernel, arch in (("triton", ">=sm_80"), ("cuda", ">=sm_90")):
    run = functools.partial(launched, WITH_GRADIENT.kernel(kernel))
    cross_entropy_with_gradient.implementation(kernel, arch=arch)(run)
register_peers(cross_entropy_with_gradient, LEAVES, composed=composed, liger=loss.liger, quack=loss.quack)


@cross_entropy_with_gradient.choice
@guarded
def choose(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, check_labels: bool = False, **options: Any
) -> Choice:
    asked = Options(**options)
    arguments = (*(() if weight is None else (weight,)), *asked, True, False)
    chosen = WITH_GRADIENT.choose(logits, target, *arguments)
    check_range("cross_entropy_with_gradient", target, classes_of(logits), asked.ignore_index, check_labels)
    rows, labels = in_rows(logits, target)
    return chosen if rows is logits else WITH_GRADIENT.choose(rows, labels, *arguments)


@cross_entropy_with_gradient.function
def cross_entropy_with_gradient_function(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float | None = None, reduction: str = "mean",
    check_labels: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cross entropy and its gradient, from one read of the logits.

    Args:
        All are those of ``cross_entropy``.

    Returns:
        The loss as ``cross_entropy`` gives it, and its gradient by the logits (of their shape and dtype; with the reduction
        "none" that of the losses' sum). Neither is tracked by autograd.

    Raises:
        TypeError, ValueError: as ``cross_entropy``.
    """
    wide, weight = in_fp32(logits, weight)
    named = {"weight": weight, **Options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)._asdict()}
    chosen = choose(wide, target, check_labels=check_labels, **named).implementation
    rows, target = in_rows(wide.detach(), target, copied=chosen == "torch")
    function = reference_pair if chosen == "torch" else functools.partial(launched, WITH_GRADIENT)
    loss, gradient = function(logits=rows, target=target, **named)
    gradient = gradient.to(logits.dtype)
    if logits.ndim != 2:
        shape = losses_shape(logits)
        loss = loss.view(shape) if reduction == "none" else loss
        gradient = gradient.view(*shape, rows.shape[1]).movedim(-1, min(1, logits.ndim - 1))
    return loss, gradient
