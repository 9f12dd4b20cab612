"""``sgd(params, grads, momentum_buffers=None, …)``: one step of SGD for a list of tensors, in place, in one launch."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import sgd as functional

from weft.definition import Mutant, Operator, Tolerance, Workload, workload
from weft.operators import peers
from weft.operators.checks import check_flag
from weft.operators.mutants import changed
from weft.operators.optimizer import dispatch, workloads
from weft.operators.optimizer.dispatch import Arguments
from weft.operators.optimizer.rules import SGD

Tensors = Sequence[Tensor]


@torch.no_grad()
def reference(
    params: Tensors, grads: Tensors, momentum_buffers: Tensors | None = None, lr: float | Tensor = 1e-3,
    momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False,
) -> None:  # fmt: skip
    """In fp32 at least."""
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        wide = torch.promote_types(p.dtype, torch.float32)
        weight = p.to(wide)
        g = (-g if maximize else g).to(wide) + weight_decay * weight
        if momentum_buffers is not None:
            b = momentum * momentum_buffers[i].to(wide) + (1 - dampening) * g
            momentum_buffers[i].copy_(b)
            g = g + momentum * b if nesterov else b
        p.copy_(weight - lr * g)


def with_torch(**how: Any) -> Any:
    @torch.no_grad()
    def torch_sgd(params: Tensors, grads: Tensors, momentum_buffers: Tensors | None, **options: Any) -> None:
        buffers: list[Tensor | None] = list(momentum_buffers or ()) or [None for _ in params]
        workloads.decline_mixed(params, params if momentum_buffers is None else momentum_buffers)
        functional.sgd(list(params), list(grads), buffers, **options, **how)

    return torch_sgd


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Options: see ``workloads``; ``momentum`` (there are buffers), ``nesterov``."""
    momentum = w.option("momentum", True)
    made: dict[str, Any] = workloads.lists(w, g, device, {"momentum_buffers": False} if momentum else {})
    made.setdefault("momentum_buffers", None)
    dampening = 0.2 if momentum and not w.option("nesterov") else 0.0
    numbers = {"lr": 1e-1, "momentum": 0.9 if momentum else 0.0, "dampening": dampening, "weight_decay": 0.1}
    return {**made, **numbers, "nesterov": w.option("nesterov", False), "maximize": w.option("maximize", False)}


sgd = Operator(
    name="sgd",
    axes=workloads.AXES,
    inputs=inputs,
    reference=reference,
    cost=lambda w, direction: workloads.cost(w, 1 if w.option("momentum", True) else 0, 7),
    options={**workloads.OPTIONS, "momentum": (True, False), "nesterov": (True, False)},
    mutates=("params", "momentum_buffers"),
    tolerance=Tolerance(scale="tensor", ulps=4.0),
    workloads=workloads.with_verified(workload(T=3, P=700, momentum=False), workload(T=3, P=700, nesterov=True)),
    mutants=[
        *workloads.mutants(reference, "momentum_buffers"),
        Mutant("no momentum", changed(reference, momentum=lambda momentum: 0.0)),
        Mutant("not dampened", changed(reference, dampening=lambda dampening: 0.0)),
    ],
)


def check(a: Arguments) -> None:
    check_flag("sgd", "nesterov", a.options["nesterov"])
    dampening = a.options["dampening"]
    if isinstance(dampening, bool) or not isinstance(dampening, (int, float)) or not math.isfinite(dampening):
        raise ValueError(f"sgd: argument 'dampening' is {dampening!r:.40}; expected a finite number")
    if a.options["momentum"] and "momentum_buffers" not in a.lists:
        raise ValueError("sgd: argument 'momentum_buffers' is None; expected a list of tensors beside a momentum")
    if a.options["nesterov"] and (a.options["momentum"] <= 0 or dampening != 0):
        raise ValueError("sgd: argument 'nesterov' is True; expected a momentum and no dampening beside it")


BUFFERS, numbers = "momentum_buffers", ("lr", "momentum", "weight_decay")
step = dispatch.register(sgd, SGD, (BUFFERS,), numbers, optional=BUFFERS, check=check, begun=True)
sgd.implementation("torch")(with_torch(fused=True))
sgd.implementation("torch-foreach")(with_torch(foreach=True))
sgd.implementation("torch.compile", devices=("cuda",))(peers.Compiled(with_torch(foreach=True)))


@sgd.function
def sgd_function(
    params: Sequence[Tensor], grads: Sequence[Tensor], momentum_buffers: Sequence[Tensor] | None = None,
    lr: float | Tensor = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
    nesterov: bool = False, maximize: bool = False,
) -> None:  # fmt: skip
    """One step of SGD in place, one launch for all tensors; :class:`weft.optim.SGD` is the optimizer.

    Args:
        momentum_buffers: of the weights' dtype or float32, or None: no momentum. (A first step begins with a copy of the
            gradient in place of them.)
        momentum: decay of the buffers.
        dampening: a buffer takes 1 − that of the gradient.
        weight_decay: that times the weight is added to the gradient.
        nesterov: go along the gradient and momentum times the new buffer. All others: see ``weft.ops.adam``.

    Returns:
        None: weights and buffers are changed in place. Arithmetic is fp32; 16-bit results are rounded once.

    Raises:
        TypeError, ValueError: as ``weft.ops.adam``.

    Source: Sutskever et al. 2013.
    """
    step(params, grads, momentum_buffers, lr, momentum, dampening, weight_decay, nesterov, maximize)
