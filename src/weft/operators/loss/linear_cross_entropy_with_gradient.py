"""``linear_cross_entropy_with_gradient(x, weight, target)``: the loss and its gradients from one call, without autograd.

What a training step pays for its head: three products of 2·T·D·V operations. It is also what timing "forward and backward"
of linear cross entropy means, with its memory: peers run both inside the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload
from weft.operators import mutants
from weft.operators.call import Choice, guarded, traced
from weft.operators.loss import linear_cross_entropy as linear
from weft.operators.loss import linear_reference as definition
from weft.operators.loss.autograd import as_autocast
from weft.operators.loss.dispatch import LINEAR_WITH_GRADIENT, under_autocast
from weft.operators.loss.linear_chunks import call_of, loss_and_gradients
from weft.operators.loss.linear_cross_entropy import Compiled, plain
from weft.operators.loss.linear_reference import (
    OPTIONS,
    WRONG,
    few_workloads,
    inputs,
    loss_and_gradients_of,
    reference,
)

All = tuple[Tensor, Tensor, Tensor, Tensor | None]

# ---- implementations -------------------------------------------------------------------------------------------------


def both(function: Any) -> Any:
    """Loss and gradients by autograd, as four."""

    def called(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> All:
        loss, found = loss_and_gradients_of(function, None, x, weight, target, **options)
        return loss, found[0], found[1], found[2] if len(found) > 2 else None

    return called


def traceable(x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any) -> All:
    """By ``torch.func``, which a compiler can follow."""

    def of(leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        loss = reference(leaves[0], leaves[1], target, bias=leaves[2] if bias is not None else None, **options)
        return loss.sum(), loss

    found, loss = torch.func.grad(of, has_aux=True)((x, weight) if bias is None else (x, weight, bias))
    return loss, found[0], found[1], found[2] if bias is not None else None


def chunked(x: Tensor, weight: Tensor, target: Tensor, *, chunk_rows: int | None = None, **options: Any) -> All:
    call = call_of(x, weight, target, chunk_rows_asked=chunk_rows, **options)
    with torch.no_grad():
        loss, (dx, dweight, dbias) = loss_and_gradients(call, (True, True, call.bias is not None))
    return loss, dx, dweight, dbias  # type: ignore[return-value]


class CompiledBoth(Compiled):
    """Compiled forward and its compiled backward, both within the call."""

    def __call__(self, *, chunk_rows: Any = None, accumulate: Any = None, **args: Any) -> Any:
        def forward(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
            loss: Tensor = Compiled.__call__(self, x=x, weight=weight, target=target, **options)
            return loss

        return both(forward)(**args)


# ---- definition ------------------------------------------------------------------------------------------------------


def cost(w: Workload, direction: str) -> Cost:
    return definition.cost(w, 3, True)


def _wrong_loss(function: Any) -> Any:
    return lambda **arguments: (function(**arguments), *both(reference)(**arguments)[1:])


def _wrong_gradients(function: Any) -> Any:
    return lambda **arguments: (reference(**arguments), *both(function)(**arguments)[1:])


def _some(outputs: All) -> tuple[Tensor, ...]:
    return tuple(o for o in outputs if o is not None)


linear_cross_entropy_with_gradient = Operator(
    name="linear_cross_entropy_with_gradient",
    axes={"T": "tokens", "D": "hidden size", "V": "classes"},
    inputs=inputs,
    reference=plain(both(reference)),
    cost=cost,
    options=OPTIONS,
    tolerance=Tolerance(scale="row", ulps=2.0, terms=lambda w: max(w.axes.values())),
    workloads=few_workloads(),
    mutants=[
        *mutants.usual(lambda **arguments: _some(plain(both(reference))(**arguments))),
        *(Mutant(f"{name} in the loss", plain(_wrong_loss(function))) for name, function in WRONG.items()),
        *(Mutant(f"{name} in the gradients", plain(_wrong_gradients(function))) for name, function in WRONG.items()),
    ],
)

linear_cross_entropy_with_gradient.implementation("chunked", backend="triton", arch=">=sm_80")(chunked)
linear_cross_entropy_with_gradient.implementation("torch")(plain(both(definition.composed)))
linear_cross_entropy_with_gradient.implementation("torch.compile", devices=("cuda",))(CompiledBoth(definition.composed))
linear_cross_entropy_with_gradient.implementation("liger", requires="liger-kernel", devices=("cuda",))(
    plain(both(linear.liger))
)
linear_cross_entropy_with_gradient.implementation("quack", requires="quack-kernels", devices=("cuda",))(
    plain(both(linear.quack))
)

# ---- what users call -------------------------------------------------------------------------------------------------


@linear_cross_entropy_with_gradient.choice
@guarded
def choose(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Choice:
    return LINEAR_WITH_GRADIENT.choose(
        *linear.arguments("linear_cross_entropy_with_gradient", x, weight, target, **options)
    )


@linear_cross_entropy_with_gradient.function
def linear_cross_entropy_with_gradient_function(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accumulate: dtype | None = None,
    check_labels: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Cross entropy of a linear layer's logits and its gradients, from one call.

    Args:
        x, weight, target, bias, class_weight, ignore_index, label_smoothing, z_loss, soft_cap, reduction, chunk_rows,
            accumulate, check_labels: those of ``linear_cross_entropy``.

    Returns:
        The loss as ``linear_cross_entropy`` gives it, and its gradients by x [T, D], weight [V, D] and bias [V] (None
        without one), in their dtypes; with the reduction "none" those of the losses' sum. Nothing is tracked by autograd.
        Multiply float16 losses before differentiating: their gradients may underflow here, where nothing scales them.

    Raises:
        TypeError: tensors of other dtypes, or dtypes that differ.
        ValueError: shapes, devices or options that do not fit; with ``check_labels``, a label out of range.
    """
    named: dict[str, Any] = {
        "class_weight": class_weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "soft_cap": soft_cap,
        "reduction": reduction,
    }
    how: dict[str, Any] = {"chunk_rows": chunk_rows, "accumulate": accumulate}
    chosen = choose(x, weight, target, bias=bias, check_labels=check_labels, **named, **how).implementation
    given = x.dtype
    x, weight = x.detach(), weight.detach()
    if chosen == "torch":
        function = traceable if traced(x, weight, target) else both(reference)
        loss, *found = function(x.float() if under_autocast(x) else x, weight, target, bias=bias, **named)
    else:
        x, weight, more = as_autocast(x, weight, bias, accumulate)
        loss, *found = chunked(x, weight, target, chunk_rows=chunk_rows, **named, **more)
    dx, dweight, dbias = (None if t is None else t.to(given) for t in found)
    return loss, dx, dweight, dbias  # type: ignore[return-value]
