"""``cross_entropy_with_gradient(logits, target)``: the loss and its gradient from one call, without autograd.

What a training step pays for its loss: the logits are read once and the gradient is written once. It is also what timing
"forward and backward" of cross entropy means: peers run both inside the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, guarded, widened
from weft.operators.loss import cross_entropy as loss
from weft.operators.loss.dispatch import WITH_GRADIENT
from weft.operators.loss.dispatch import check_labels as look_at_labels
from weft.operators.loss.reference import OPTIONS, WRONG, composed, inputs, reference, with_gradient, workloads

# ---- implementations -------------------------------------------------------------------------------------------------


def reference_pair(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """By ``torch.func``, which a compiler can follow."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = reference(x, target, **options)
        return loss.sum(), loss

    gradient, loss = torch.func.grad(both, has_aux=True)(logits)
    return loss, gradient


def launched(plans: Any) -> Any:
    def both(logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        if not logits.numel():
            raise Declined("empty: nothing to launch")
        logits, dx = logits.detach(), torch.empty_like(logits)
        tensors = (logits, target) if weight is None else (logits, target, weight)
        plan = plans.of(tensors, *loss.asked(**options))
        return plan(logits, target, logits if weight is None else weight, dx)[0], dx

    return both


def _peer(function: Any) -> Any:
    return lambda logits, target, **options: with_gradient(function, logits, target, **options)


class CompiledBoth(peers.Compiled):
    """Compiled forward and its compiled backward, both within the call."""

    def __call__(self, **args: Any) -> Any:
        return with_gradient(lambda logits: peers.Compiled.__call__(self, **{**args, "logits": logits}), args["logits"])


# ---- definition ------------------------------------------------------------------------------------------------------


def cost(w: Workload, direction: str) -> Cost:
    forward, backward = loss.cost(w, "forward"), loss.cost(w, "backward")
    return Cost(
        reads=forward.reads,
        writes=forward.writes + backward.writes,
        vector_flops=forward.vector_flops + backward.vector_flops,
        special_ops=forward.special_ops,
    )


def _wrong_loss(function: Any) -> Any:
    return lambda logits, target, **options: (
        function(logits, target, **options),
        reference_pair(logits, target, **options)[1],
    )


def _wrong_gradient(function: Any) -> Any:
    return lambda logits, target, **options: (
        reference(logits, target, **options),
        with_gradient(function, logits, target, **options)[1],
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
        *(Mutant(f"{name} in the loss", _wrong_loss(function)) for name, function in WRONG.items()),
        *(Mutant(f"{name} in the gradient", _wrong_gradient(function)) for name, function in WRONG.items()),
    ],
)

cross_entropy_with_gradient.implementation("triton", arch=">=sm_80")(launched(WITH_GRADIENT.kernel("triton")))
cross_entropy_with_gradient.implementation("cuda", arch=">=sm_90", devices=("cuda",))(
    launched(WITH_GRADIENT.kernel("cuda"))
)
cross_entropy_with_gradient.implementation("torch")(_peer(composed))
cross_entropy_with_gradient.implementation("torch.compile", devices=("cuda",))(CompiledBoth(composed))
cross_entropy_with_gradient.implementation("liger", requires="liger-kernel", devices=("cuda",))(_peer(loss.liger))
cross_entropy_with_gradient.implementation("quack", requires="quack-kernels", devices=("cuda",))(_peer(loss.quack))

# ---- what users call -------------------------------------------------------------------------------------------------


@cross_entropy_with_gradient.choice
@guarded
def choose(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, check_labels: bool = False, **options: Any
) -> Choice:
    tensors = (logits, target) if weight is None else (logits, target, weight)
    chosen = WITH_GRADIENT.choose(*tensors, *loss.asked(**options))
    look_at_labels(
        "cross_entropy_with_gradient", target, logits.shape[1], options.get("ignore_index", -100), check_labels
    )
    return chosen


@cross_entropy_with_gradient.function
def cross_entropy_with_gradient_function(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    check_labels: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cross entropy and its gradient, from one read of the logits.

    Args:
        logits, target, weight, ignore_index, label_smoothing, z_loss, soft_cap, reduction, check_labels: those of
            ``cross_entropy``.

    Returns:
        The loss as ``cross_entropy`` gives it, and its gradient by the logits ([M, V], in their dtype; with the reduction
        "none" that of the losses' sum). Neither is tracked by autograd.

    Raises:
        TypeError: tensors of other dtypes.
        ValueError: shapes, devices or options that do not fit; with ``check_labels``, a label out of range.
    """
    named: dict[str, Any] = {
        "weight": weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "soft_cap": soft_cap,
        "reduction": reduction,
    }
    chosen = choose(logits, target, check_labels=check_labels, **named).implementation
    (wide,) = widened(logits.detach())
    loss, gradient = (reference_pair if chosen == "torch" else launched(WITH_GRADIENT))(wide, target, **named)
    return loss, gradient.to(logits.dtype)
