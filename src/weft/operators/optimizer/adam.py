"""``adam(params, grads, exp_avgs, exp_avg_sqs, steps, …)``: one step of Adam for a list of tensors, in place, in one launch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import adam as functional

from weft.definition import Mutant, Operator, Tolerance, Workload, workload
from weft.operators import peers
from weft.operators.mutants import changed
from weft.operators.optimizer import dispatch, workloads
from weft.operators.optimizer.rules import ADAM


def reference(decoupled: bool) -> Callable[..., None]:
    """Of :func:`adam_function`'s arguments, in fp32 at least: of 16 bits, a gradient that the decay nearly cancels keeps few
    digits, and its square fewer."""

    def adam(params, grads, exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs, lr, betas, eps, weight_decay, maximize):
        beta1, beta2 = betas
        for i, (p, g, m, v, step) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
            wide = torch.promote_types(torch.promote_types(p.dtype, m.dtype), torch.float32)
            weight, g = p.to(wide), (-g if maximize else g).to(wide)
            step += 1
            if decoupled:
                weight = weight * (1 - lr * weight_decay)
            else:
                g = g + weight_decay * weight
            first = beta1 * m.to(wide) + (1 - beta1) * g
            second = beta2 * v.to(wide) + (1 - beta2) * g * g
            m.copy_(first)
            v.copy_(second)
            if max_exp_avg_sqs is not None:
                second = torch.maximum(max_exp_avg_sqs[i].to(wide), second)
                max_exp_avg_sqs[i].copy_(second)
            root2 = (1 - beta2 ** step.double()).sqrt().to(wide)
            size = (lr / (1 - beta1 ** step.double())).to(wide)
            p.copy_(weight - size * (first / (second.sqrt() / root2 + eps)))

    return torch.no_grad()(adam)


def peer(decoupled: bool, **how: Any) -> Callable[..., None]:
    """PyTorch's own, ``fused=True`` or ``foreach=True``."""

    def with_torch(
        exp_avgs: list[Tensor], steps: list[Tensor], max_exp_avg_sqs: list[Tensor] | None, betas: Any, **given: Any
    ) -> None:
        workloads.decline_mixed(given["params"], exp_avgs)
        functional.adam(
            exp_avgs=exp_avgs, max_exp_avg_sqs=max_exp_avg_sqs or [], state_steps=steps, beta1=betas[0], beta2=betas[1],
            amsgrad=max_exp_avg_sqs is not None, capturable=steps[0].is_cuda, decoupled_weight_decay=decoupled, **given, **how,
        )  # fmt: skip

    return torch.no_grad()(with_torch)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Options: see ``workloads``; ``amsgrad`` has the largest second moment too."""
    states = {"exp_avgs": False, "exp_avg_sqs": True, **({"max_exp_avg_sqs": True} if w.option("amsgrad") else {})}
    made: dict[str, Any] = workloads.lists(w, g, device, states)
    made.setdefault("max_exp_avg_sqs", None)
    return {**made, "steps": workloads.counts(w, device), **workloads.NUMBERS, "maximize": w.option("maximize", False)}


def uncorrected(right: Callable[..., None]) -> Callable[..., None]:
    def wrong(**arguments: Any) -> None:
        right(**{**arguments, "steps": [torch.full_like(s, 1e6) for s in arguments["steps"]]})
        for step in arguments["steps"]:
            step += 1

    return wrong


def mutants(decoupled: bool) -> list[Mutant]:
    right = reference(decoupled)

    def one_step_late(**arguments: Any) -> None:
        for step in arguments["steps"]:
            step += 1
        right(**{**arguments, "steps": workloads.copies(arguments["steps"])})

    return [
        *workloads.mutants(right, "exp_avgs", "exp_avg_sqs"),
        Mutant("step not counted", changed(right, steps=workloads.copies)),
        Mutant("no bias correction", uncorrected(right)),
        Mutant("bias correction of the next step", one_step_late),
        Mutant("betas swapped", changed(right, betas=lambda betas: betas[::-1])),
        Mutant("the other kind of decay", reference(not decoupled)),
    ]


def definition(decoupled: bool) -> dict[str, Any]:
    """Of Adam or (decoupled) AdamW: the operator's fields but for its name."""
    return {
        "axes": workloads.AXES,
        "inputs": inputs,
        "reference": reference(decoupled),
        # a square root and a division an element, among others
        "cost": lambda w, direction: workloads.cost(w, 3 if w.option("amsgrad") else 2, 14, 2),
        "options": {**workloads.OPTIONS, "amsgrad": (True, False)},
        "mutates": ("params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "steps"),
        "tolerance": Tolerance(scale="tensor", ulps=4.0),
        "workloads": workloads.with_verified(workload(T=3, P=700, amsgrad=True)),
        "mutants": mutants(decoupled),
    }


def register(operator: Operator, decoupled: bool) -> Callable[..., None]:
    """Adds the implementations and the choice, and returns the operator's step."""
    states, numbers = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"), ("lr", "eps", "weight_decay")
    options: dict[str, Any] = {"optional": states[2], "decoupled_weight_decay": decoupled}
    step = dispatch.register(operator, ADAM, states, numbers, kernels=("triton", "cuda"), **options)
    operator.implementation("torch")(peer(decoupled, fused=True))
    operator.implementation("torch-foreach")(peer(decoupled, foreach=True))
    operator.implementation("torch.compile", devices=("cuda",))(peers.Compiled(peer(decoupled, foreach=True)))
    return step


adam = Operator(name="adam", **definition(decoupled=False))
step = register(adam, decoupled=False)


@adam.function
def adam_function(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], max_exp_avg_sqs: Sequence[Tensor] | None = None, lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, maximize: bool = False,
) -> None:  # fmt: skip
    """One step of Adam in place, one launch for all tensors; :class:`weft.optim.Adam` is the optimizer.

    Args:
        params: weights, of any shapes; float32, float16 or bfloat16, in any mixture.
        grads: their gradients.
        exp_avgs: first moments, of the weights' dtype or float32.
        exp_avg_sqs: second moments, likewise.
        steps: one float32 of one element for each weight, on the same device: steps done so far; incremented.
        max_exp_avg_sqs: the largest second moments (AMSGrad), or None.
        lr: learning rate; a float32 tensor on the device is read by the kernel.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: ``weight_decay`` times the weight is added to the gradient.
        maximize: maximize the objective instead of minimizing it.

    Returns:
        None: weights, moments and steps are changed in place. Arithmetic is fp32; 16-bit results are rounded once.

    Raises:
        TypeError: not lists of tensors of those dtypes, or ``maximize`` that is not a bool.
        ValueError: lists of other lengths, tensors of other shapes or devices, numbers out of range.

    Source: Kingma & Ba 2015.
    """
    step(params, grads, exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs, lr, betas, eps, weight_decay, maximize)
