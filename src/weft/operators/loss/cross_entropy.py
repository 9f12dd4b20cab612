"""``cross_entropy(logits, target)`` over a vocabulary: the loss, and its gradient in the same pass.

The loss compulsorily reads the logits [M, V]; with the gradient they are read once and the gradient is written once. About
ten operations an element: memory bandwidth is the limit (formulas: kernels.py; theory and measurements: docs/notes/loss.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, differentiable, eager, guarded, traced
from weft.operators.loss.autograd import CrossEntropy
from weft.operators.loss.dispatch import BACKWARD, FORWARD, LossCall
from weft.operators.loss.dispatch import check_labels as look_at_labels
from weft.operators.loss.reference import OPTIONS, WRONG, Options, composed, gradient, inputs, reference, workloads

# ---- implementations -------------------------------------------------------------------------------------------------


def asked(soft_cap: float | None = None, **options: Any) -> tuple[Any, ...]:
    """A call's options in the order of ``LossCall.of``."""
    return tuple({**vars(Options(**options)), "soft_cap": soft_cap}.values())


def cross_entropy_triton(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    weight, o = _options(**options)
    call = (weight, o.ignore_index, o.label_smoothing, o.z_loss, o.soft_cap, o.reduction)
    return torch.ops.weft.cross_entropy(logits, target, *call)[0]


def by_kernel(kernel: str, backward: str, at_once: bool) -> Any:
    """``at_once``: the gradient is made with the loss; else backward makes it from each row's maximum and sum."""
    plans, backward_plans = FORWARD.kernel(kernel), BACKWARD.kernel(backward)

    def implementation(logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **options: Any) -> Tensor:
        if not logits.numel():
            raise Declined("empty: nothing to launch")
        wanted = at_once and torch.is_grad_enabled() and logits.requires_grad
        tensors = (logits, target) if weight is None else (logits, target, weight)
        plan = plans.of(tensors, *asked(**options), wanted, False)
        return differentiable(CrossEntropy, logits, target, weight, plan, backward_plans, False)

    return implementation


def liger(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """It writes the gradient over the logits where one is wanted."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    weight, o = _options(**options)
    cap = o.soft_cap or None
    call = (weight, o.ignore_index, o.z_loss, o.label_smoothing, o.reduction, cap, False)
    loss: Tensor = LigerCrossEntropyFunction.apply(logits, target, *call)[0]
    return loss


def quack(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    from quack.cross_entropy import cross_entropy as quack_cross_entropy

    weight, o = _options(**options)
    if o.label_smoothing or o.z_loss or o.soft_cap:
        raise Declined("QuACK's cross entropy has no label smoothing, z-loss or soft cap")
    loss: Tensor = quack_cross_entropy(
        logits, target, weight=weight, ignore_index=o.ignore_index, reduction=o.reduction
    )
    return loss.to(logits.dtype)


def _options(
    weight: Tensor | None = None, soft_cap: float | None = None, **options: Any
) -> tuple[Tensor | None, Options]:
    return weight, Options(soft_cap=soft_cap or 0.0, **options)


# ---- definition ------------------------------------------------------------------------------------------------------


def cost(w: Workload, direction: str) -> Cost:
    m, n = w["M"], w["M"] * w["V"] * (100 - w.option("ignored", 0)) // 100
    s = w.bytes_per_element
    losses = (m if w.option("reduction") == "none" else 1) * s
    labels = m * (4 if w.option("labels") == "int32" else 8)
    if direction == "forward":
        return Cost(reads=n * s + labels, writes=losses, vector_flops=4 * n, special_ops=n)
    return Cost(reads=n * s + labels + losses, writes=m * w["V"] * s, vector_flops=4 * n, special_ops=n)


def _gradient_of(function: Any) -> Any:
    def wrong(dloss: Tensor, logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            return torch.autograd.grad(function(leaf, target, **options), leaf, dloss)

    return wrong


cross_entropy = Operator(
    name="cross_entropy",
    axes={"M": "rows", "V": "classes"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options=OPTIONS,
    differentiable=("logits",),
    tolerance=Tolerance(scale="row", ulps=2.0, terms=lambda w: 32),
    workloads=workloads(),
    mutants=[
        *mutants.usual(reference),
        *(Mutant(name, function) for name, function in WRONG.items()),
        *mutants.usual(gradient, "backward"),
        *(Mutant(name, _gradient_of(function), "backward") for name, function in WRONG.items()),
    ],
)

cross_entropy.implementation("triton", arch=">=sm_80")(cross_entropy_triton)
cross_entropy.implementation("single-program", backend="triton", arch=">=sm_80")(
    by_kernel("single-program", "triton", at_once=True)
)
cross_entropy.implementation("cuda", arch=">=sm_90", devices=("cuda",))(by_kernel("cuda", "cuda", at_once=False))
cross_entropy.implementation("torch")(composed)
cross_entropy.implementation("torch.compile", devices=("cuda",))(peers.Compiled(composed))
cross_entropy.implementation("liger", requires="liger-kernel", devices=("cuda",), directions=("forward",))(liger)
cross_entropy.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)

# ---- what users call -------------------------------------------------------------------------------------------------


@cross_entropy.choice
@guarded
def choose(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    inplace_backward: bool = False,
    check_labels: bool = False,
    direction: str = "forward",
    **options: Any,
) -> Choice:
    backward = direction == "backward"
    tensors = (logits, target) if weight is None else (logits, target, weight)
    wanted = backward or (torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad)
    arguments = (*tensors, *asked(**options), wanted, inplace_backward)
    chosen = FORWARD.choose(*arguments)
    look_at_labels("cross_entropy", target, logits.shape[1], options.get("ignore_index", -100), check_labels)
    if not backward or chosen.implementation == "torch":
        return chosen
    call = LossCall.of(*arguments)
    if call.at_once and not call.traced:
        return Choice(chosen.implementation, f"with the loss: {chosen.reason}")
    dloss = logits.new_empty(call.m if call.options.reduction == "none" else ())
    return BACKWARD.choose(logits, target, call.w, dloss, torch.empty_like(logits), call.options, weight is not None)


@cross_entropy.function
def cross_entropy_function(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    inplace_backward: bool = False,
    check_labels: bool = False,
) -> Tensor:
    """Cross entropy of logits against labels, with what language models add to it.

    Args:
        logits: [M, V]; float32, float16 or bfloat16.
        target: [M], labels 0 … V - 1; int64 or int32.
        weight: [V], of each class, of the logits' dtype or float32; None for 1.
        ignore_index: the label of rows that count for nothing; their logits are not read.
        label_smoothing: the share of the target that is spread evenly over all classes.
        z_loss: coefficient of the square of each row's logsumexp (PaLM, arXiv 2204.02311); its mean is over the rows that
            count, whatever they weigh.
        soft_cap: c, for logits ``c * tanh(logits / c)`` (Gemma 2, arXiv 2408.00118); None for none.
        reduction: "mean" (over the labels' weights), "sum" or "none".
        inplace_backward: write the gradient over the logits, which must not be used afterwards; backward works once. In eager
            mode (a compiler plans memory itself).
        check_labels: raise ValueError for a label out of range: waits for the device. Without it such a row's loss and
            gradient are NaN.

    Returns:
        The loss, [] or with "none" [M], in the logits' dtype; computed in fp32 and rounded once. As in PyTorch, a row whose
        label has a logit of -inf costs inf, one that holds NaN or +inf or only -inf costs NaN, and a mean over no label is
        NaN. Under autocast the logits are cast to float32, as PyTorch does.

    Raises:
        TypeError: tensors of other dtypes, an ``ignore_index`` that is no int, flags that are no bool.
        ValueError: shapes, devices or options that do not fit; with ``check_labels``, a label out of range.

    In eager mode the gradient of a mean or sum is made in the same pass as the loss, except for float16 (where it would
    underflow before the loss is scaled).
    """
    tensors = (logits, target) if weight is None else (logits, target, weight)
    constant = weight is None or (isinstance(weight, Tensor) and not weight.requires_grad)
    plain = check_labels is False and type(inplace_backward) is bool and constant
    options = (ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if plain and eager(*tensors, gradient=True):
        wanted = logits.requires_grad and torch.is_grad_enabled()
        plan = FORWARD.of(tensors, *options, wanted, inplace_backward)
        if plan is not None:
            if wanted:
                return CrossEntropy.apply(logits, target, weight, plan, BACKWARD, inplace_backward)
            return plan(logits, target, logits if weight is None else weight, logits)[0]
    named: dict[str, Any] = {
        "weight": weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "soft_cap": soft_cap,
        "reduction": reduction,
    }
    flags = {"check_labels": check_labels, "inplace_backward": inplace_backward}
    if choose(logits, target, **flags, **named).implementation == "torch":
        return reference(logits, target, **named)
    if torch.is_autocast_enabled("cuda"):
        logits = logits.float()
    if traced(logits, target):
        return cross_entropy_triton(logits, target, **named)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    plan = FORWARD.of((logits, *tensors[1:]), *options, wanted, inplace_backward)
    loss: Tensor = differentiable(CrossEntropy, logits, target, weight, plan, BACKWARD, inplace_backward)
    return loss
