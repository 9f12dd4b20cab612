"""``cross_entropy(logits, target)`` over a vocabulary: the loss, and its gradient in the same pass.

The loss compulsorily reads the logits [M, V]; with the gradient they are read once and the gradient is written once. About
ten operations an element: memory bandwidth is the limit (formulas: kernels.py; theory and measurements: README.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload
from weft.operators import mutants, peers
from weft.operators.call import (
    FLOATS,
    Choice,
    check_device,
    check_tensor,
    differentiable,
    on_gpu,
    reference_gradients,
    traced,
)
from weft.operators.launch import target_sm
from weft.operators.loss import cluster
from weft.operators.loss.definition import OPTIONS, REDUCTIONS, WRONG, composed, gradient, inputs, reference, workloads
from weft.operators.loss.kernels import ONE_PASS, Options
from weft.operators.loss.launches import backward_plans, forward_plans, scale_plans

CLUSTER_FROM = 16384  # classes from which a cluster of blocks takes a row, as for softmax

# ---- PyTorch operators -----------------------------------------------------------------------------------------------


@torch.library.triton_op("weft::cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, stats, label sums), the last two for the gradient: ``launches.Forward``."""
    options = Options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if not on_gpu(logits) or not logits.numel():
        loss = reference(logits, target, weight=weight, **keywords(options))
        none = torch.empty((2, 0), device=logits.device, dtype=torch.float32)
        return loss, none, none.clone()
    return launch(logits, target, weight, None, options, "triton")


@torch.library.triton_op("weft::cross_entropy_backward", mutates_args=())
def backward_op(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    sums: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    soft_cap: float,
    reduction: str,
) -> Tensor:
    options = Options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if not on_gpu(logits) or not logits.numel():
        return gradient(dloss, logits, target, weight=weight, **keywords(options))[0]
    dx = torch.empty_like(logits)
    again(dloss, logits, target, weight, stats, sums, dx, options)
    return dx


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options = inputs
    _, stats, sums = output
    ctx.save_for_backward(logits, target, weight, stats, sums)
    ctx.mark_non_differentiable(stats, sums)


def _backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dx = torch.ops.weft.cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options)
    return dx, *[None] * 7


cross_entropy_op.register_autograd(_backward, setup_context=_save)

# ---- launches --------------------------------------------------------------------------------------------------------


def keywords(options: Options) -> dict[str, Any]:
    return {**vars(options), "soft_cap": options.soft_cap or None}


def launch(
    logits: Tensor, target: Tensor, weight: Tensor | None, dx: Tensor | None, options: Options, back_end: str
) -> tuple[Tensor, Tensor, Tensor]:
    w, out = logits if weight is None else weight, logits if dx is None else dx
    plans = forward_plans.of((logits, target, w, out), options, weight is not None, dx is not None, back_end)
    return plans(logits, target, w, out)


def again(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    sums: Tensor,
    dx: Tensor,
    options: Options,
) -> None:
    w = logits if weight is None else weight
    plan = backward_plans.of((logits, target, w, dloss, dx), options, weight is not None)
    plan(logits, target, w, sums, stats, dloss, dx)


class CrossEntropy(torch.autograd.Function):
    """In eager mode. Where the gradient needs nothing that is known only later, it is made with the loss and kept; backward
    multiplies it by the loss's gradient on the device, unless that is 1. It is handed out once: whoever asks again (a retained
    graph) has it made again from the logits. What is known only later: each row's share (reduction "none"), and the loss
    scale, without which fp16 gradients would underflow."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: Options,
        back_end: str,
        wanted: bool,
        inplace: bool,
    ) -> Tensor:
        ctx.options, ctx.inplace = options, inplace
        ctx.gradient = None
        if wanted and options.reduction != "none" and logits.dtype != torch.float16:
            ctx.gradient = logits if inplace else torch.empty_like(logits)
        loss, stats, sums = launch(logits, target, weight, ctx.gradient, options, back_end)
        if inplace and wanted:
            ctx.logits = logits
            ctx.save_for_backward(target, weight, stats, sums)
            if ctx.gradient is not None:
                torch.autograd.graph.increment_version(logits)  # whoever saved the logits must hear of it
        else:
            ctx.save_for_backward(target, weight, stats, sums, logits)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        target, weight, stats, sums, *kept = ctx.saved_tensors
        rest = (None,) * 6
        if kept and torch.is_grad_enabled():
            named = {"weight": weight, **keywords(ctx.options)}

            def loss_of(x: Tensor) -> Tensor:
                return reference(x, target, **named)

            return (*reference_gradients(loss_of, kept, (True,), (dloss,)), *rest)
        made, ctx.gradient = ctx.gradient, None
        if made is not None:
            scale_plans.of((made,))(dloss, made)
            ctx.logits = None
            return (made.detach(), *rest)
        if ctx.inplace:
            if ctx.logits is None:
                raise RuntimeError(
                    "cross_entropy: a second backward after inplace_backward=True, which wrote the gradient over 'logits'; "
                    "expected one backward, or inplace_backward=False"
                )
            logits, ctx.logits = ctx.logits, None
            dx = logits.detach()
            torch.autograd.graph.increment_version(logits)
        else:
            (logits,) = kept
            dx = torch.empty_like(logits)
        again(dloss, logits, target, weight, stats, sums, dx, ctx.options)
        return (dx, *rest)


# ---- implementations -------------------------------------------------------------------------------------------------


def cross_entropy_triton(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    weight, o = _options(**options)
    call = (weight, o.ignore_index, o.label_smoothing, o.z_loss, o.soft_cap, o.reduction)
    loss: Tensor = torch.ops.weft.cross_entropy(logits, target, *call)[0]
    return loss


def cross_entropy_cluster(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    weight, asked = _options(**options)
    if not logits.numel():
        raise Declined("empty: nothing to launch")
    return launch(logits, target, weight, None, asked, "cuda")[0]


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
cross_entropy.implementation("cuda", arch=">=sm_90", devices=("cuda",), directions=("forward",))(cross_entropy_cluster)
cross_entropy.implementation("torch")(composed)
cross_entropy.implementation("torch.compile", devices=("cuda",))(peers.Compiled(composed))
cross_entropy.implementation("liger", requires="liger-kernel", devices=("cuda",), directions=("forward",))(liger)
cross_entropy.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(
    name: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    soft_cap: float | None,
    asked: Options,
    check_labels: bool,
) -> None:
    check_tensor(name, "logits", logits)
    check_tensor(name, "target", target, (torch.int64, torch.int32))
    check_device(name, "target", target, "logits", logits)
    if logits.ndim != 2 or target.ndim != 1 or target.shape[0] != logits.shape[0]:
        raise ValueError(
            f"{name}: arguments 'logits' and 'target' have shapes {tuple(logits.shape)} and {tuple(target.shape)}; "
            "expected [M, V] and [M] (flatten leading dimensions)"
        )
    if weight is not None:
        check_tensor(name, "weight", weight, tuple(dict.fromkeys((logits.dtype, *FLOATS[:1]))))
        check_device(name, "weight", weight, "logits", logits)
        if weight.shape != logits.shape[1:]:
            raise ValueError(
                f"{name}: argument 'weight' has shape {tuple(weight.shape)}; expected {tuple(logits.shape[1:])}, one for "
                f"each class of 'logits' {tuple(logits.shape)}"
            )
    if not isinstance(asked.ignore_index, int):
        raise TypeError(f"{name}: argument 'ignore_index' is {asked.ignore_index!r}; expected an int")
    if not _number(asked.label_smoothing) or not 0 <= asked.label_smoothing <= 1:
        raise ValueError(f"{name}: argument 'label_smoothing' is {asked.label_smoothing!r}; expected 0 … 1")
    if not _number(asked.z_loss) or not 0 <= asked.z_loss < math.inf:
        raise ValueError(f"{name}: argument 'z_loss' is {asked.z_loss!r}; expected a number of at least 0")
    if soft_cap is not None and (not _number(soft_cap) or not 0 < soft_cap < math.inf):
        raise ValueError(f"{name}: argument 'soft_cap' is {soft_cap!r}; expected a positive number, or None for none")
    if asked.reduction not in REDUCTIONS:
        raise ValueError(f"{name}: argument 'reduction' is {asked.reduction!r}; expected {', '.join(REDUCTIONS)}")
    if check_labels:
        _check_labels(name, target, logits.shape[1], asked.ignore_index)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_labels(name: str, target: Tensor, classes: int, ignore_index: int) -> None:
    if traced(target):
        raise ValueError(
            f"{name}: check_labels=True needs the values of 'target', which tracing does not know; expected False there"
        )
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}: argument 'target' has label {int(target[row])} in row {row} ({int(wrong.sum())} such in all); "
            f"expected 0 … {classes - 1}, or ignore_index {ignore_index}"
        )


def back_end(logits: Tensor, asked: Options, has_weight: bool) -> Choice:
    """Which of our kernels serves logits on the GPU."""
    v = logits.shape[1]
    long = v >= CLUSTER_FROM and target_sm(logits.device) >= 90
    if long and not cluster.why_not(logits, asked, has_weight, torch.empty_like(logits, device="meta")):
        return Choice("cuda", f"{v} classes: a cluster of blocks holds a row, which is read once", forward_plans)
    return Choice("triton", f"{v} classes: " + ("held in registers" if v <= ONE_PASS else "walked"), forward_plans)


@cross_entropy.choice
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
    if weight is not None and weight.requires_grad:
        raise ValueError(
            "cross_entropy: argument 'weight' wants a gradient, which there is none of; expected a constant"
        )
    if not on_gpu(logits):
        return Choice("torch", "the tensors are on the CPU, where weft runs the reference")
    if not logits.numel():
        return Choice("torch", "empty: nothing to launch")
    if traced(logits, target):
        return Choice("triton", "traced: PyTorch operators that a compiler sees", forward_plans)
    return back_end(logits, asked, weight is not None)


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
        TypeError: tensors of other dtypes.
        ValueError: shapes, devices or options that do not fit; with ``check_labels``, a label out of range.

    In eager mode the gradient of a mean or sum is made in the same pass as the loss, except for float16 (where it would
    underflow before the loss is scaled).
    """
    named: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "reduction": reduction,
    }
    chosen = choose(logits, target, weight=weight, soft_cap=soft_cap, check_labels=check_labels, **named).implementation
    if chosen == "torch":
        return reference(logits, target, weight=weight, soft_cap=soft_cap, **named)
    if torch.is_autocast_enabled("cuda"):
        logits = logits.float()
    if traced(logits, target):
        return cross_entropy_triton(logits, target, weight=weight, soft_cap=soft_cap, **named)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if inplace_backward and wanted and 0 in logits.stride():
        raise ValueError(
            f"cross_entropy: inplace_backward=True and 'logits' with strides {logits.stride()}; expected a "
            "place in memory for each element"
        )
    asked = Options(soft_cap=soft_cap or 0.0, **named)
    loss: Tensor = differentiable(CrossEntropy, logits, target, weight, asked, chosen, wanted, inplace_backward)
    return loss
