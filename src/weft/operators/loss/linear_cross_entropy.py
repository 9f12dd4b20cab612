"""``linear_cross_entropy(x, weight, target)``: cross entropy of x · weightᵀ, whose logits [T, V] are never held.

The loss takes one product of 2·T·D·V operations, the gradients two more; at D = 4096 in 16 bits that is thousands of
operations a byte, so the rate of the matrix units is the limit. What it saves is memory: T·V logits and their copies
(methods, counts and measurements: docs/notes/loss.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, differentiable, guarded
from weft.operators.loss import linear_reference as definition
from weft.operators.loss.autograd import LinearCrossEntropy, as_autocast
from weft.operators.loss.dispatch import LINEAR_FORWARD, under_autocast
from weft.operators.loss.linear_chunks import call_of
from weft.operators.loss.linear_reference import OPTIONS, WRONG, gradients, gradients_of, inputs, reference, workloads
from weft.operators.loss.reference import Options

# ---- implementations -------------------------------------------------------------------------------------------------


def ours(at_once: bool) -> Any:
    def function(x: Tensor, weight: Tensor, target: Tensor, *, chunk_rows: int | None = None, **options: Any) -> Tensor:
        call = call_of(x, weight, target, chunk_rows_asked=chunk_rows, **options)
        loss: Tensor = differentiable(LinearCrossEntropy, x, weight, call.bias, call, at_once)
        return loss

    return function


def plain(function: Any) -> Any:
    """Without the arguments that say how, not what."""

    def called(*args: Any, chunk_rows: Any = None, accumulate: Any = None, **options: Any) -> Any:
        return function(*args, **options)

    return called


class Compiled(peers.Compiled):
    """Of the formulas, which take no advice on chunks."""

    def __call__(self, *, chunk_rows: Any = None, accumulate: Any = None, **args: Any) -> Any:
        return super().__call__(**args)


def liger(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    soft_cap: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Its default: dweight summed in its own dtype over as many chunks as V / D."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    o = Options(**options)
    call = (bias, class_weight, o.ignore_index, o.z_loss, o.label_smoothing, o.reduction, soft_cap)
    loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target, *call)[0]
    return loss.to(x.dtype)


def quack(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    soft_cap: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Its default: chunks of 4096 tokens, dweight summed in fp32."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    o = Options(**options)
    if (
        bias is not None
        or class_weight is not None
        or soft_cap
        or o.label_smoothing
        or o.z_loss
        or o.reduction == "none"
    ):
        raise Declined("QuACK's has no bias, class weights, label smoothing, z-loss, soft cap or reduction 'none'")
    if x.dtype == torch.float32 or any(n % 8 for n in (*x.shape, weight.shape[0])):
        raise Declined("QuACK's takes 16-bit inputs whose sizes are multiples of 8")
    loss: Tensor = chunked_linear_cross_entropy(
        x, weight, target, ignore_index=o.ignore_index, reduction=o.reduction, tuned=False
    )
    return loss.to(x.dtype)


# ---- definition ------------------------------------------------------------------------------------------------------


def cost(w: Workload, direction: str) -> Cost:
    return definition.cost(w, 1, True) if direction == "forward" else definition.cost(w, 3, False)


def _gradient_of(function: Any) -> Any:
    return lambda dloss, x, weight, target, **options: gradients_of(
        plain(function), dloss, x, weight, target, **options
    )


linear_cross_entropy = Operator(
    name="linear_cross_entropy",
    axes={"T": "tokens", "D": "hidden size", "V": "classes"},
    inputs=inputs,
    reference=plain(reference),
    cost=cost,
    directions=("forward", "backward"),
    options=OPTIONS,
    differentiable=("x", "weight", "bias"),
    tolerance={
        "forward": Tolerance(scale="row", ulps=2.0, terms=lambda w: max(w.axes.values())),
        "backward": Tolerance(scale=definition.gradient_terms, ulps=2.0, terms=lambda w: max(w.axes.values())),
    },
    workloads=workloads(),
    mutants=[
        *mutants.usual(plain(reference)),
        *(Mutant(name, plain(function)) for name, function in WRONG.items()),
        *mutants.usual(plain(gradients), "backward"),
        *(Mutant(name, _gradient_of(function), "backward") for name, function in WRONG.items()),
    ],
)

linear_cross_entropy.implementation("triton", arch=">=sm_80")(ours(False))
linear_cross_entropy.implementation("chunked", backend="triton", arch=">=sm_80")(ours(True))
linear_cross_entropy.implementation("torch")(plain(definition.composed))
linear_cross_entropy.implementation("torch.compile", devices=("cuda",))(Compiled(definition.composed))
linear_cross_entropy.implementation("liger", requires="liger-kernel", devices=("cuda",))(plain(liger))
linear_cross_entropy.implementation("quack", requires="quack-kernels", devices=("cuda",))(plain(quack))

# ---- what users call -------------------------------------------------------------------------------------------------


@linear_cross_entropy.choice
@guarded
def choose(x: Tensor, weight: Tensor, target: Tensor, *, direction: str = "forward", **options: Any) -> Choice:
    wanted = torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in (x, weight, options.get("bias"))
    )
    call = arguments("linear_cross_entropy", x, weight, target, **options)
    return LINEAR_FORWARD.choose(*call, wanted or direction == "backward")


def arguments(
    name: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    soft_cap: float | None = None,
    check_labels: bool = False,
    chunk_rows: int | None = None,
    accumulate: dtype | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Of a ``LinearCall``."""
    asked = Options(soft_cap=soft_cap or 0.0, **options)
    return name, x, weight, target, bias, class_weight, asked, soft_cap, check_labels, chunk_rows, accumulate


@linear_cross_entropy.function
def linear_cross_entropy_function(
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
) -> Tensor:
    """Cross entropy of a linear layer's logits, x · weightᵀ + bias, which are never all in memory.

    Args:
        x: [T, D], the last hidden states; float32, float16 or bfloat16. Rows that are ignored must be finite: zero times
            NaN is NaN in the weight's gradient.
        weight: [V, D], as ``torch.nn.Linear`` keeps it, of x's dtype and device.
        target: [T], labels 0 … V - 1; int64 or int32.
        bias: [V], of x's dtype, or None.
        class_weight: [V], of each class, of x's dtype or float32; None for 1.
        ignore_index: the label of rows that count for nothing.
        label_smoothing: the share of the target that is spread evenly over all classes.
        z_loss: coefficient of the square of each row's logsumexp (PaLM, arXiv 2204.02311); its mean is over the rows that
            count, whatever they weigh.
        soft_cap: c, for logits ``c * tanh(logits / c)`` (Gemma 2, arXiv 2408.00118); None for none.
        reduction: "mean" (over the labels' weights), "sum" or "none".
        chunk_rows: tokens whose logits are in memory at once while gradients are made; None for as many as take 1 GiB.
        accumulate: the dtype that chunks' shares of the weight's gradient are summed in: x's (rounded once for each
            chunk) or float32 (4·V·D bytes more); None for x's up to 4 chunks, else float32.
        check_labels: raise ValueError for a label out of range: waits for the device. Without it such a row's loss and
            gradients are NaN.

    Returns:
        The loss, [] or with "none" [T], in x's dtype; under autocast, where the tensors are cast as
        ``torch.nn.functional.linear`` does, in float32. As in PyTorch, a mean over no label is NaN.

    Raises:
        TypeError: tensors of other dtypes, or dtypes that differ.
        ValueError: shapes, devices or options that do not fit; with ``check_labels``, a label out of range.

    In eager mode the gradients of a mean or sum are made with the loss (three products in all), except for float16; else in
    backward, from logits that are made again (four). Without a gradient wanted no logit is written.
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
    if chosen == "torch":
        return reference(x.float() if under_autocast(x) else x, weight, target, bias=bias, **named)
    x, weight, more = as_autocast(x, weight, bias, accumulate)
    loss: Tensor = ours(chosen == "chunked")(x, weight, target, chunk_rows=chunk_rows, **named, **more)
    return loss
