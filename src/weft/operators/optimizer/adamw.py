"""``adamw(params, grads, exp_avgs, exp_avg_sqs, steps, …)``: one step of AdamW for a list of tensors, in place, in one launch.

Reads weight, gradient and two moments, writes weight and moments: 28 bytes a parameter in fp32, 14 in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.definition import Cost, Operator, Tolerance, Workload, workload
from weft.operators import peers
from weft.operators.call import Choice, guarded
from weft.operators.optimizer import adam_calls, definition
from weft.operators.optimizer.adam_cuda import AdamTable
from weft.operators.optimizer.table import Table

reference = adam_calls.reference(decoupled=True)


def cost(w: Workload, direction: str) -> Cost:
    states = 3 if w.option("amsgrad") else 2
    return definition.cost(states, adam_calls.FLOPS, adam_calls.SPECIAL)(w, direction)


adamw = Operator(
    name="adamw",
    axes=definition.AXES,
    inputs=adam_calls.inputs,
    reference=reference,
    cost=cost,
    options=adam_calls.OPTIONS,
    mutates=adam_calls.MUTATES,
    tolerance=Tolerance(scale="tensor", ulps=4.0),
    workloads={
        **definition.WORKLOADS,
        "verify": [*definition.WORKLOADS["verify"], workload(T=3, P=700, amsgrad=True)],
    },
    mutants=adam_calls.mutants(decoupled=True),
)

adamw.implementation("triton", arch=">=sm_80")(adam_calls.engine(True, Table))
adamw.implementation("cuda", arch="==sm_90", devices=("cuda",))(adam_calls.engine(True, AdamTable.of_all))
adamw.implementation("torch")(adam_calls.peer(True, fused=True))
adamw.implementation("torch-foreach")(adam_calls.peer(True, foreach=True))
adamw.implementation("torch.compile", devices=("cuda",))(peers.Compiled(adam_calls.peer(True, foreach=True)))


@adamw.choice
@guarded
def choose(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
) -> Choice:
    numbers: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    tensors = adam_calls.lists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    return adam_calls.choose("adamw", tensors, steps, True, maximize, numbers)


@adamw.function
def adamw_function(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
) -> None:
    """One step of AdamW in place, one launch for all tensors; :class:`weft.optim.AdamW` is the optimizer.

    Args:
        params: weights, of any shapes; float32, float16 or bfloat16, mixed as may be.
        grads: their gradients.
        exp_avgs: first moments, of the weights' dtype or float32.
        exp_avg_sqs: second moments, likewise.
        steps: one float32 of one element for each weight, on the same device: steps done so far; counted up.
        max_exp_avg_sqs: the largest second moments (AMSGrad), or None.
        lr: learning rate; a float32 tensor on the device is read by the kernel.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled: the weight loses ``lr * weight_decay`` of itself.
        maximize: go up the gradient.

    Returns:
        None: weights, moments and steps are changed in place. Arithmetic is fp32; what is kept in 16 bits is rounded once.

    Raises:
        TypeError: not lists of tensors of those dtypes, or ``maximize`` that is not a bool.
        ValueError: lists of other lengths, tensors of other shapes or devices, numbers out of range.

    Source: Loshchilov & Hutter 2019.
    """
    numbers: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    tensors = adam_calls.lists(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    if adam_calls.choose("adamw", tensors, steps, True, maximize, numbers).implementation == "torch":
        reference(params, grads, exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs, maximize=maximize, **numbers)
    else:
        adam_calls.launch(tensors, steps, True, maximize, **numbers)
