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
from weft.operators.call import Choice, guarded, on_gpu, traced, widened
from weft.operators.loss import cross_entropy as loss
from weft.operators.loss.arguments import check
from weft.operators.loss.calls import launch
from weft.operators.loss.definition import OPTIONS, WRONG, composed, inputs, reference, with_gradient, workloads
from weft.operators.loss.kernels import Options

# ---- implementations -------------------------------------------------------------------------------------------------


def reference_pair(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """By ``torch.func``, which a compiler can follow."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = reference(x, target, **options)
        return loss.sum(), loss

    gradient, loss = torch.func.grad(both, has_aux=True)(logits)
    return loss, gradient


def _ours(back_end: str) -> Any:
    def both(
        logits: Tensor, target: Tensor, *, weight: Tensor | None = None, soft_cap: float | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if not logits.numel():
            raise Declined("empty: nothing to launch")
        dx = torch.empty_like(logits)
        asked = Options(soft_cap=soft_cap or 0.0, **options)
        return launch(logits.detach(), target, weight, dx, asked, back_end)[0], dx

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

cross_entropy_with_gradient.implementation("triton", arch=">=sm_80")(_ours("triton"))
cross_entropy_with_gradient.implementation("cuda", arch=">=sm_90", devices=("cuda",))(_ours("cuda"))
cross_entropy_with_gradient.implementation("torch")(_peer(composed))
cross_entropy_with_gradient.implementation("torch.compile", devices=("cuda",))(CompiledBoth(composed))
cross_entropy_with_gradient.implementation("liger", requires="liger-kernel", devices=("cuda",))(_peer(loss.liger))
cross_entropy_with_gradient.implementation("quack", requires="quack-kernels", devices=("cuda",))(_peer(loss.quack))

# ---- what users call -------------------------------------------------------------------------------------------------


@cross_entropy_with_gradient.choice
@guarded
def choose(
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
) -> Choice:
    asked = Options(ignore_index, label_smoothing, z_loss, soft_cap or 0.0, reduction)
    check("cross_entropy_with_gradient", logits, target, weight, soft_cap, asked, check_labels)
    if not on_gpu(logits):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if not logits.numel():
        return Choice("torch", "empty: nothing to launch")
    if traced(logits, target):
        return Choice("torch", "traced: there cross_entropy and its backward serve, which a compiler sees")
    return loss.back_end(logits, asked, weight is not None)


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
    loss, gradient = (reference_pair if chosen == "torch" else _ours(chosen))(wide, target, **named)
    return loss, gradient.to(logits.dtype)
