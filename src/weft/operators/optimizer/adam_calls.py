"""What ``adam`` and ``adamw`` share besides the rule: reference, inputs, PyTorch's implementations, checks, launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import adam as functional

from weft.definition import Mutant, Workload
from weft.operators.call import Choice
from weft.operators.optimizer import call, definition, fastest
from weft.operators.optimizer.adam_rule import ADAM
from weft.operators.optimizer.table import Table

Tensors = Sequence[Tensor]
OPTIONS = {**definition.OPTIONS, "amsgrad": (True, False)}
FLOPS, SPECIAL = 14, 2  # of a parameter: a square root and a division among them


def reference(decoupled: bool) -> Callable[..., None]:
    def adam_reference(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        steps: Tensors,
        max_exp_avg_sqs: Tensors | None = None,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        beta1, beta2 = betas
        for i, (p, g, m, v, step) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
            wide = torch.promote_types(p.dtype, m.dtype)
            g = (-g if maximize else g).to(wide)
            step += 1
            if decoupled:
                p.mul_(1 - lr * weight_decay)
            else:
                g = g + weight_decay * p
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            second = v if max_exp_avg_sqs is None else torch.maximum(max_exp_avg_sqs[i], v, out=max_exp_avg_sqs[i])
            root2 = (1 - beta2 ** step.double()).sqrt().to(wide)
            size = (lr / (1 - beta1 ** step.double())).to(wide)
            p.sub_(size * (m / (second.sqrt() / root2 + eps)))

    return torch.no_grad()(adam_reference)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Options: see ``definition``; ``amsgrad`` keeps the largest second moment too."""
    states = {"exp_avgs": False, "exp_avg_sqs": True, **({"max_exp_avg_sqs": True} if w.option("amsgrad") else {})}
    made: dict[str, Any] = definition.lists(w, g, device, states)
    made.setdefault("max_exp_avg_sqs", None)
    return {
        **made,
        "steps": definition.counts(w, device),
        "lr": 1e-1,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "maximize": w.option("maximize", False),
    }


def peer(decoupled: bool, **how: bool) -> Callable[..., None]:
    """PyTorch's own, ``fused=True`` or ``foreach=True``."""

    def with_torch(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        steps: Tensors,
        max_exp_avg_sqs: Tensors | None,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool,
    ) -> None:
        definition.decline_mixed(params, exp_avgs)
        functional.adam(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            list(max_exp_avg_sqs or ()),
            list(steps),
            amsgrad=max_exp_avg_sqs is not None,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
            capturable=steps[0].is_cuda,
            decoupled_weight_decay=decoupled,
            **how,  # type: ignore[arg-type]
        )

    return torch.no_grad()(with_torch)


def lists(params: Tensors, grads: Tensors, m: Tensors, v: Tensors, largest: Tensors | None) -> call.Lists:
    found = {"params": params, "grads": grads, "exp_avgs": m, "exp_avg_sqs": v}
    return found if largest is None else {**found, "max_exp_avg_sqs": largest}


def check(operator: str, tensors: call.Lists, steps: Tensors, maximize: bool, numbers: dict[str, Any]) -> None:
    call.check_lists(operator, tensors, steps)
    call.check_flags(operator, maximize=maximize)
    call.check_betas(operator, numbers["betas"])
    for name in ("lr", "eps", "weight_decay"):
        call.check_number(operator, name, numbers[name])


def options_of(tensors: call.Lists, decoupled: bool, numbers: dict[str, Any]) -> dict[str, Any]:
    return {**numbers, "amsgrad": "max_exp_avg_sqs" in tensors, "decoupled_weight_decay": decoupled}


def launch(
    tensors: call.Lists,
    steps: Tensors,
    decoupled: bool,
    maximize: bool,
    kind: Callable[..., Table] = fastest.table,
    **numbers: Any,
) -> None:
    options = options_of(tensors, decoupled, numbers)
    call.launch(ADAM, tensors, steps, options, maximize, kind=kind)


def engine(decoupled: bool, kind: Callable[..., Table]) -> Callable[..., None]:
    """A step in one launch of a table of this kind."""

    def step(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        steps: Tensors,
        max_exp_avg_sqs: Tensors | None = None,
        *,
        maximize: bool = False,
        **numbers: Any,
    ) -> None:
        tensors = lists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        launch(tensors, steps, decoupled, maximize, kind, **numbers)

    return step


def mutants(decoupled: bool) -> list[Mutant]:
    right, other = reference(decoupled), reference(not decoupled)

    def forgets_the_count(**arguments: Any) -> None:
        right(**{**arguments, "steps": [s.clone() for s in arguments["steps"]]})

    def uncorrected(**arguments: Any) -> None:
        right(**{**arguments, "steps": [torch.full_like(s, 1e6) for s in arguments["steps"]]})
        for step in arguments["steps"]:
            step += 1

    def one_step_late(**arguments: Any) -> None:
        for step in arguments["steps"]:
            step += 1
        right(**{**arguments, "steps": [s.clone() for s in arguments["steps"]]})

    def betas_swapped(**arguments: Any) -> None:
        right(**{**arguments, "betas": arguments["betas"][::-1]})

    return [
        *definition.mutants(right, "exp_avgs", "exp_avg_sqs"),
        Mutant("step not counted", forgets_the_count),
        Mutant("no bias correction", uncorrected),
        Mutant("bias correction of the next step", one_step_late),
        Mutant("betas swapped", betas_swapped),
        Mutant("the other kind of decay", other),
    ]


MUTATES = ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps")


def choose(
    operator: str, tensors: call.Lists, steps: Tensors, decoupled: bool, maximize: bool, numbers: dict[str, Any]
) -> Choice:
    check(operator, tensors, steps, maximize, numbers)
    return call.choose(tensors, ADAM, steps, options_of(tensors, decoupled, numbers))
