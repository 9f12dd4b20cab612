"""``cross_entropy(logits, target)`` over a vocabulary: the loss, and its gradient in the same pass.

The loss compulsorily reads the logits [M, V]; with the gradient they are read once and the gradient is written once. About
ten operations an element: memory bandwidth is the limit (formulas: kernels.py; theory and measurements: docs/notes/loss.md).
"""

import functools
from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, eager, guarded, on_gpu, traced
from weft.operators.launch import Plans
from weft.operators.loss import dispatch
from weft.operators.loss.dispatch import BACKWARD, FORWARD, Forward
from weft.operators.loss.kernels import scale_plans
from weft.operators.loss.reference import OPTIONS, WRONG, Options, composed, gradient, inputs, reference, workloads

# ---- operators of torch.library ------------------------------------------------------------------------------------------


def as_options(ignore_index: int, label_smoothing: float, z_loss: float, soft_cap: float, reduction: str) -> Options:
    """Of plain numbers, 0 for no ``soft_cap``: a compiler that traces may pass symbolic ones."""
    return Options(int(ignore_index), float(label_smoothing), float(z_loss), float(soft_cap) or None, reduction)


@torch.library.triton_op("weft::cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    soft_cap: float, reduction: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, stats, label sums), the last two for the gradient: ``dispatch.Forward``."""
    options = as_options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if not on_gpu(logits) or not logits.numel():
        loss = reference(logits, target, weight=weight, **options._asdict())
        none = torch.empty((2, 0), device=logits.device, dtype=torch.float32)
        return loss, none, none.clone()
    return launch(FORWARD.kernel("triton"), logits, target, weight, options)


@torch.library.triton_op("weft::cross_entropy_backward", mutates_args=())
def backward_op(
    dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, stats: Tensor, sums: Tensor, ignore_index: int,
    label_smoothing: float, z_loss: float, soft_cap: float, reduction: str,
) -> Tensor:  # fmt: skip
    options = as_options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)
    if not on_gpu(logits) or not logits.numel():
        return gradient(dloss, logits, target, weight=weight, **options._asdict())[0]
    saved = logits, target, weight, stats, sums
    return launch_backward(BACKWARD.kernel("triton"), dloss, saved, torch.empty_like(logits), options)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options = inputs
    _, stats, sums = output
    ctx.save_for_backward(logits, target, weight, stats, sums)
    ctx.mark_non_differentiable(stats, sums)


def _backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return torch.ops.weft.cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options), *[None] * 7


cross_entropy_op.register_autograd(_backward, setup_context=_save)


def launch(
    plans: Plans, logits: Tensor, target: Tensor, weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, stats, label sums), without a gradient."""
    tensors = (logits, target) if weight is None else (logits, target, weight.detach())
    return plans.of(tensors, *options, False, False)(logits, target, logits if weight is None else weight, logits)


def launch_backward(plans: Plans, dloss: Tensor, saved: tuple[Any, ...], dx: Tensor, options: Options) -> Tensor:
    """dx, from the logits, the target, the weight, the statistics and the labels' sums."""
    logits, target, weight, stats, sums = saved
    w = logits if weight is None else weight
    plan = plans.of((logits, target, w, dloss, dx), options, weight is not None)
    plan(logits, target, w, sums if sums.numel() else stats, stats, dloss, dx)
    return dx


# ---- autograd in eager mode --------------------------------------------------------------------------------------------------


class CrossEntropy(KernelFunction):
    """With ``plan.at_once`` the gradient is made with the loss and saved; backward multiplies it by the loss's gradient on the
    device, unless that is 1. It is returned once: a second backward (a retained graph) computes it again from the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, plan: Forward, backward: Plans, inplace: bool
    ) -> Tensor:
        ctx.options, ctx.inplace, ctx.backward_plans = plan.options, inplace, backward
        ctx.gradient = None
        if plan.at_once:
            ctx.gradient = logits if inplace else torch.empty_like(logits)
        dx = logits if ctx.gradient is None else ctx.gradient
        loss, stats, sums = plan(logits, target, logits if weight is None else weight, dx)
        if inplace and plan.wanted:
            ctx.logits = logits
            ctx.save_for_backward(target, weight, stats, sums)
            if ctx.gradient is not None:
                torch.autograd.graph.increment_version(logits)  # autograd must know that saved logits are overwritten
        else:
            ctx.save_for_backward(target, weight, stats, sums, logits)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        target, weight, stats, sums, *saved = ctx.saved_tensors
        rest = (None,) * 5
        if saved and torch.is_grad_enabled():

            def loss_of(x: Tensor) -> Tensor:
                return reference(x, target, weight=weight, **ctx.options._asdict())

            return (*reference_gradients(loss_of, saved, (True,), (dloss,)), *rest)
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
            (logits,) = saved
            dx = torch.empty_like(logits)
        if stats is None:  # a single program saves nothing for a second gradient
            _, stats, sums = launch(FORWARD.kernel("triton"), logits, target, weight, ctx.options)
        saved = logits, target, weight, stats, sums
        return (launch_backward(ctx.backward_plans, dloss, saved, dx, ctx.options), *rest)


def cross_entropy_triton(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, soft_cap: float | None = None, **options: Any
) -> Tensor:
    return torch.ops.weft.cross_entropy(logits, target, weight, *Options(soft_cap=soft_cap or 0.0, **options))[0]


def by_kernel(
    kernel: str, backward: str, at_once: bool, logits: Tensor, target: Tensor, *, weight: Tensor | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """``at_once``: the gradient is made with the loss; else backward makes it from each row's maximum and sum."""
    if not logits.numel():
        raise Declined("empty: nothing to launch")
    wanted = at_once and torch.is_grad_enabled() and logits.requires_grad
    tensors = (logits, target) if weight is None else (logits, target, weight)
    plan = FORWARD.kernel(kernel).of(tensors, *Options(**options), wanted, False)
    return differentiable(CrossEntropy, logits, target, weight, plan, BACKWARD.kernel(backward), False)


def liger(logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **options: Any) -> Tensor:
    """It writes the gradient over the logits where one is wanted."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    o = Options(**options)
    call = (weight, o.ignore_index, o.z_loss, o.label_smoothing, o.reduction, o.soft_cap, False)
    return LigerCrossEntropyFunction.apply(logits, target, *call)[0]


def quack(logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **options: Any) -> Tensor:
    from quack.cross_entropy import cross_entropy as quack_cross_entropy

    o = Options(**options)
    if o.label_smoothing or o.z_loss or o.soft_cap:
        raise Declined("QuACK's cross entropy has no label smoothing, z-loss or soft cap")
    how = {"weight": weight, "ignore_index": o.ignore_index, "reduction": o.reduction}
    return quack_cross_entropy(logits, target, **how).to(logits.dtype)


def cost(w: Workload, direction: str) -> Cost:
    m, n = w["M"], w["M"] * w["V"] * (100 - w.option("ignored", 0)) // 100
    s = w.bytes_per_element
    losses = (m if w.option("reduction") == "none" else 1) * s
    labels = m * (4 if w.option("labels") == "int32" else 8)
    if direction == "forward":
        return Cost(reads=n * s + labels, writes=losses, vector_flops=4 * n, special_ops=n)
    return Cost(reads=n * s + labels + losses, writes=m * w["V"] * s, vector_flops=4 * n, special_ops=n)


cross_entropy = Operator(
    name="cross_entropy",
    axes={"M": "rows", "V": "classes"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options=OPTIONS,
    differentiable=("logits",),
    tolerance=Tolerance(scale="row", ulps=2.0, terms=lambda w: 32),
    workloads=workloads(),
    mutants=[
        *mutants.usual(reference),
        *(Mutant(name, function) for name, function in WRONG.items()),
        *mutants.usual(gradient, "backward"),
        *(Mutant(name, mutants.gradient_of(function, "logits"), "backward") for name, function in WRONG.items()),
    ],
)

cross_entropy.implementation("triton", arch=">=sm_80")(cross_entropy_triton)
cross_entropy.implementation("single-program", backend="triton", arch=">=sm_80")(
    functools.partial(by_kernel, "single-program", "triton", True)
)
cross_entropy.implementation("cuda", arch=">=sm_90")(functools.partial(by_kernel, "cuda", "cuda", False))
peers.register(cross_entropy, composed)
cross_entropy.implementation("liger", requires="liger-kernel", devices=("cuda",), directions=("forward",))(liger)
cross_entropy.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)


@cross_entropy.choice
@guarded
def choose(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, inplace_backward: bool = False,
    check_labels: bool = False, direction: str = "forward", **options: Any,
) -> Choice:  # fmt: skip
    backward = direction == "backward"
    wanted = backward or (torch.is_grad_enabled() and isinstance(logits, Tensor) and logits.requires_grad)
    asked = Options(**options)
    arguments = (*(() if weight is None else (weight,)), *asked, wanted, inplace_backward)
    chosen = FORWARD.choose(logits, target, *arguments)
    dispatch.check_range("cross_entropy", target, dispatch.classes_of(logits), asked.ignore_index, check_labels)
    rows, labels = dispatch.in_rows(logits, target)
    if rows is not logits:
        logits, target, chosen = rows, labels, FORWARD.choose(rows, labels, *arguments)
    if not backward or chosen.implementation == "torch":
        return chosen
    call: Any = dispatch.loss_call("cross_entropy", False, logits, target, *arguments)
    if call.at_once and not call.traced:
        return Choice(chosen.implementation, f"with the loss: {chosen.reason}")
    dloss = logits.new_empty(call.m if call.options.reduction == "none" else ())
    return BACKWARD.choose(logits, target, call.w, dloss, torch.empty_like(logits), call.options, weight is not None)


@cross_entropy.function
def cross_entropy_function(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float | None = None, reduction: str = "mean",
    inplace_backward: bool = False, check_labels: bool = False,
) -> Tensor:  # fmt: skip
    """Cross entropy of logits against labels, with what language models add to it.

    Args:
        logits: [M, V], or as of ``torch.nn.functional.cross_entropy`` [V] or [N, V, d1, …]; float32, float16, bfloat16 or
            float64. Where no view makes rows of them (several images whose channels come first) the loss is PyTorch's.
        target: [M] ([], [N, d1, …]), labels 0 … V - 1, int64 or int32; or class probabilities of the logits' shape, whose
            loss is PyTorch's.
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
        The loss, [] or with "none" of the labels' shape, in the logits' dtype; computed in fp32 and rounded once. As in
        PyTorch, a row whose label has a logit of -inf costs inf, one that holds NaN or +inf or only -inf costs NaN, and a mean
        over no label is NaN. Under autocast logits and weight are cast to float32, as PyTorch does, on a CPU as well.

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
    logits, weight = dispatch.in_fp32(logits, weight)
    named = {"weight": weight, **Options(*options)._asdict()}
    flags = {"check_labels": check_labels, "inplace_backward": inplace_backward}
    chosen = choose(logits, target, **flags, **named).implementation
    rows, target = dispatch.in_rows(logits, target, copied=chosen == "torch")
    if chosen == "torch":
        loss = reference(rows, target, **named)
    elif traced(rows, target):
        loss = cross_entropy_triton(rows, target, **named)
    else:
        wanted = torch.is_grad_enabled() and logits.requires_grad
        tensors = (rows, target) if weight is None else (rows, target, weight)
        plan = FORWARD.of(tensors, *options, wanted, inplace_backward)
        loss = differentiable(CrossEntropy, rows, target, weight, plan, BACKWARD, inplace_backward)
    return loss.view(dispatch.losses_shape(logits)) if reduction == "none" and logits.ndim != 2 else loss
