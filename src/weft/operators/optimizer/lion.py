"""``lion(params, grads, exp_avgs, …)``: one step of Lion for a list of tensors, in place, in one launch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Tolerance, Workload
from weft.operators import peers
from weft.operators.mutants import changed
from weft.operators.optimizer import dispatch, workloads
from weft.operators.optimizer.rules import LION

Tensors = Sequence[Tensor]
Betas = tuple[float, float]


@torch.no_grad()
def reference(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, lr: Any, betas: Betas, weight_decay: float, maximize: bool
) -> None:
    """In fp32 at least: a sign has no rounding to hide an error of its argument."""
    beta1, beta2 = betas
    for p, g, m in zip(params, grads, exp_avgs, strict=True):
        wide = p.dtype if p.dtype == torch.float64 else torch.float32
        g, moment = (-g if maximize else g).to(wide), m.to(wide)
        direction = torch.sign(beta1 * moment + (1 - beta1) * g)
        p.copy_(p.to(wide) * (1 - lr * weight_decay) - lr * direction)
        m.copy_(beta2 * moment + (1 - beta2) * g)


@torch.no_grad()
def with_foreach(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, lr: Any, betas: Betas, weight_decay: float, maximize: bool
) -> None:
    """Written by hand over PyTorch's operators on lists."""
    workloads.decline_mixed(params, exp_avgs)
    beta1, beta2 = betas
    params, grads, exp_avgs = list(params), list(grads), list(exp_avgs)
    grads = list(torch._foreach_neg(grads) if maximize else grads)
    direction = torch._foreach_mul(exp_avgs, beta1)
    torch._foreach_add_(direction, grads, alpha=1 - beta1)
    torch._foreach_sign_(direction)
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, direction, alpha=-float(lr))
    torch._foreach_mul_(exp_avgs, beta2)
    torch._foreach_add_(exp_avgs, grads, alpha=1 - beta2)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    made: dict[str, Any] = workloads.lists(w, g, device, {"exp_avgs": False})
    for grad, moment in zip(made["grads"], made["exp_avgs"], strict=True):  # no sign that only rounding decides
        grad += 0.25 * ((0.9 * moment.float() + 0.1 * grad.float()).abs() < 1e-3)
    numbers = {name: workloads.NUMBERS[name] for name in ("lr", "betas", "weight_decay")}
    return {**made, **numbers, "maximize": w.option("maximize", False)}


def _no_sign(params: Tensors, grads: Tensors, exp_avgs: Tensors, **options: Any) -> None:
    before = [p.clone() for p in params]
    reference(params, grads, exp_avgs, **options)
    for p, b, m in zip(params, before, exp_avgs, strict=True):
        p.copy_(b * (1 - options["lr"] * options["weight_decay"]) - options["lr"] * m)


lion = Operator(
    name="lion",
    axes=workloads.AXES,
    inputs=inputs,
    reference=reference,
    cost=lambda w, direction: workloads.cost(w, 1, 9),
    options=workloads.OPTIONS,
    mutates=("params", "exp_avgs"),
    tolerance=Tolerance(scale="tensor", ulps=4.0),
    workloads=workloads.WORKLOADS,
    mutants=[
        *workloads.mutants(reference, "exp_avgs"),
        Mutant("betas swapped", changed(reference, betas=lambda betas: betas[::-1])),
        Mutant("no sign", _no_sign),
    ],
)


step = dispatch.register(lion, LION, ("exp_avgs",), ("lr", "weight_decay"))
lion.implementation("torch")(reference)
lion.implementation("torch-foreach")(with_foreach)
lion.implementation("torch.compile", devices=("cuda",))(peers.Compiled(with_foreach))


@lion.function
def lion_function(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], lr: float | Tensor = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, maximize: bool = False,
) -> None:  # fmt: skip
    """One step of Lion in place, one launch for all tensors; :class:`weft.optim.Lion` is the optimizer.

    Args:
        exp_avgs: moments, of the weights' dtype or float32.
        lr: learning rate: what every weight moves by.
        betas: decay of the moment in the direction, and in the new moment.
        weight_decay: decoupled: the weight loses ``lr * weight_decay`` of itself. All others: see ``weft.ops.adam``.

    Returns:
        None: weights and moments are changed in place. Arithmetic is fp32; 16-bit results are rounded once.

    Raises:
        TypeError, ValueError: as ``weft.ops.adam``.

    Source: Chen et al. 2023.
    """
    step(params, grads, exp_avgs, lr, betas, weight_decay, maximize)
