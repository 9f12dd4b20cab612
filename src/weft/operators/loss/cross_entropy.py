"""``cross_entropy(logits, target)`` over a vocabulary: the loss, and its gradient in the same pass.

The loss compulsorily reads the logits [M, V]; with the gradient they are read once and the gradient is written once. About
ten operations an element: memory bandwidth is the limit (formulas: kernels.py; theory and measurements: README.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, check_flag, check_places, differentiable, eager, guarded, on_gpu, traced
from weft.operators.launch import Plans, target_sm
from weft.operators.loss import cluster, one_program
from weft.operators.loss.arguments import check
from weft.operators.loss.calls import CrossEntropy
from weft.operators.loss.definition import OPTIONS, WRONG, composed, gradient, inputs, reference, workloads
from weft.operators.loss.kernels import ONE_PASS, Options
from weft.operators.loss.launches import forward_plans

CLUSTER_FROM = 16384  # classes from which a cluster of blocks takes a row, as for softmax

# ---- implementations -------------------------------------------------------------------------------------------------


def cross_entropy_triton(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    weight, o = _options(**options)
    call = (weight, o.ignore_index, o.label_smoothing, o.z_loss, o.soft_cap, o.reduction)
    loss: Tensor = torch.ops.weft.cross_entropy(logits, target, *call)[0]
    return loss


def cross_entropy_one_program(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    weight, asked = _options(**options)
    if not logits.numel():
        raise Declined("empty: nothing to launch")
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if reason := one_program.why_not(logits, asked, wanted):
        raise Declined(reason)
    loss: Tensor = differentiable(CrossEntropy, logits, target, weight, asked, "one_program", wanted, False)
    return loss


def cross_entropy_cuda(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The loss without its gradient, which backward makes from each row's maximum and sum."""
    weight, asked = _options(**options)
    if not logits.numel():
        raise Declined("empty: nothing to launch")
    loss: Tensor = differentiable(CrossEntropy, logits, target, weight, asked, "cuda", False, False)
    return loss


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
cross_entropy.implementation("one_program", backend="triton", arch=">=sm_80")(cross_entropy_one_program)
cross_entropy.implementation("cuda", arch=">=sm_90", devices=("cuda",))(cross_entropy_cuda)
cross_entropy.implementation("torch")(composed)
cross_entropy.implementation("torch.compile", devices=("cuda",))(peers.Compiled(composed))
cross_entropy.implementation("liger", requires="liger-kernel", devices=("cuda",), directions=("forward",))(liger)
cross_entropy.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)

# ---- what users call -------------------------------------------------------------------------------------------------


def back_end(logits: Tensor, asked: Options, has_weight: bool) -> Choice:
    """Which of our kernels serves logits on the GPU."""
    v = logits.shape[1]
    long = v >= CLUSTER_FROM and target_sm(logits.device) >= 90
    if long and not cluster.why_not(logits, asked, has_weight, torch.empty_like(logits, device="meta")):
        return Choice("cuda", f"{v} classes: a cluster of blocks holds a row, which is read once", forward_plans)
    return Choice("triton", f"{v} classes: " + ("held in registers" if v <= ONE_PASS else "walked"), forward_plans)


@cross_entropy.choice
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
    inplace_backward: bool = False,
    check_labels: bool = False,
) -> Choice:
    asked = Options(ignore_index, label_smoothing, z_loss, soft_cap or 0.0, reduction)
    check("cross_entropy", logits, target, weight, soft_cap, asked, check_labels)
    check_flag("cross_entropy", "inplace_backward", inplace_backward)
    if inplace_backward and torch.is_grad_enabled() and logits.requires_grad:
        check_places("cross_entropy", "logits", logits, "inplace_backward=True")
    if not on_gpu(logits):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if not logits.numel():
        return Choice("torch", "empty: nothing to launch")
    if traced(logits, target):
        return Choice("triton", "traced: PyTorch operators that a compiler sees", forward_plans)
    if not one_program.why_not(logits, asked, torch.is_grad_enabled() and logits.requires_grad):
        return Choice("one_program", f"{len(logits)} rows of {logits.shape[1]}: few, in one launch", forward_plans)
    return back_end(logits, asked, weight is not None)


@dataclass(frozen=True)
class Ready:
    """A call in eager mode, decided; ``launches`` of ``(logits, target, weight, dx)``."""

    options: Options
    back_end: str
    launches: Any


def _ready(logits: Tensor, target: Tensor, *call: Any) -> Ready | None:
    """Of a call's tensors and options; None where PyTorch is called."""
    weight, rest = (call[0], call[1:]) if isinstance(call[0], Tensor) else (None, call)
    *options, reduction, wanted, inplace = rest
    ignore_index, label_smoothing, z_loss, soft_cap = options
    named: dict[str, Any] = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "soft_cap": soft_cap,
        "reduction": reduction,
    }
    named |= {"weight": weight, "ignore_index": ignore_index, "inplace_backward": inplace}
    chosen = choose(logits, target, **named).implementation
    if chosen == "torch":
        return None
    asked = Options(ignore_index, label_smoothing, z_loss, soft_cap or 0.0, reduction)
    made = wanted and reduction != "none" and logits.dtype != torch.float16
    w, dx = logits if weight is None else weight, torch.empty_like(logits) if made and not inplace else logits
    return Ready(asked, chosen, forward_plans.of((logits, target, w, dx), asked, weight is not None, made, chosen))


ready_calls = Plans(_ready)


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
    if plain and eager(*tensors, gradient=True):
        wanted = logits.requires_grad and torch.is_grad_enabled()
        options = (ignore_index, label_smoothing, z_loss, soft_cap, reduction, wanted, inplace_backward)
        ready = ready_calls.of(tensors, *options)
        if ready is not None:
            if wanted:
                how = (ready.options, ready.back_end, True, inplace_backward, ready.launches)
                return CrossEntropy.apply(logits, target, weight, *how)
            return ready.launches(logits, target, logits if weight is None else weight, logits)[0]
    named: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "reduction": reduction,
    }
    flags = {"check_labels": check_labels, "inplace_backward": inplace_backward}
    chosen = choose(logits, target, weight=weight, soft_cap=soft_cap, **flags, **named).implementation
    if chosen == "torch":
        return reference(logits, target, weight=weight, soft_cap=soft_cap, **named)
    if torch.is_autocast_enabled("cuda"):
        logits = logits.float()
    if traced(logits, target):
        return cross_entropy_triton(logits, target, weight=weight, soft_cap=soft_cap, **named)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    asked = Options(soft_cap=soft_cap or 0.0, **named)
    loss: Tensor = differentiable(CrossEntropy, logits, target, weight, asked, chosen, wanted, inplace_backward)
    return loss
