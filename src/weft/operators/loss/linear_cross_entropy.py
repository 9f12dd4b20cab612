"""``linear_cross_entropy(x, weight, target)``: cross entropy of x · weightᵀ, a chunk of logits [T, V] at a time.

The loss takes one product of 2·T·D·V operations, the gradients two more; at D = 4096 in 16 bits that is thousands of
operations a byte, so the rate of the matrix units is the limit. What it saves is memory: T·V logits and their copies
(methods, counts and measurements: docs/notes/loss.md).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, dtype  # a name alone, as the stubs want annotations
from torch.utils.checkpoint import checkpoint

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants, peers
from weft.operators.autograd import KernelFunction, differentiable, reference_gradients
from weft.operators.call import Choice, cast_for_products, guarded
from weft.operators.hopper import padded
from weft.operators.loss import reference as loss
from weft.operators.loss.dispatch import LINEAR_FORWARD, LinearCall, linear_call
from weft.operators.loss.linear_chunks import (
    gradients_of_logits,
    gradients_of_losses,
    loss_and_gradients,
    loss_and_logits,
    scaled,
)
from weft.operators.loss.linear_operator import by_operator
from weft.operators.loss.linear_statistics import loss_plans
from weft.operators.loss.reference import Options, wide
from weft.operators.matmul.dispatch import default_precision
from weft.operators.random_inputs import LAYOUTS, drawn, random_tensor

LEAVES = ("x", "weight", "bias")  # that have gradients
AT_ONCE = 2**28  # logits that the reference holds; more are made again for the gradient


def composed(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    chunk_rows: int | None = None, accumulate: dtype | None = None, **o: Any,
) -> Tensor:  # fmt: skip
    """What a user of PyTorch writes; all logits [T, V] lie in memory, whatever ``chunk_rows``."""
    return wide(loss.composed(F.linear(x, weight, bias), target, weight=class_weight, **o))


def reference(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    chunk_rows: int | None = None, accumulate: dtype | None = None, **o: Any,
) -> Tensor:  # fmt: skip
    """In fp32 or wider."""
    x, weight, bias = wide(x), wide(weight), None if bias is None else wide(bias)
    rows = max(AT_ONCE // max(weight.shape[0], 1), 1)
    if x.shape[0] <= rows:
        return loss.reference(wide(F.linear(x, weight, bias)), target, weight=class_weight, **o)
    return _by_parts(x, weight, target, bias, class_weight, rows, **o)


def _by_parts(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, of_class: Tensor | None, rows: int, *,
    reduction: str = "mean", z_loss: float = 0.0, ignore_index: int = -100, **o: Any,
) -> Tensor:  # fmt: skip
    """The mean divides the parts' sums: of the losses by the labels' weights, of the z-losses by the labels' number."""

    def part(x: Tensor, target: Tensor, z: float) -> Tensor:
        logits = wide(F.linear(x, weight, bias))
        return loss.reference(
            logits, target, weight=of_class, reduction="none", z_loss=z, ignore_index=ignore_index, **o
        )

    def losses(z: float) -> Tensor:
        parts = zip(x.split(rows), target.split(rows), strict=True)
        return torch.cat([checkpoint(part, a, b, z, use_reentrant=False) for a, b in parts])

    if reduction != "mean":
        found = losses(z_loss)
        return found if reduction == "none" else found.sum()
    counts = target != ignore_index
    label, _ = loss.in_range(target, weight.shape[0], ignore_index)
    weights = counts.to(x.dtype) if of_class is None else of_class.to(x.dtype)[label.masked_fill(~counts, 0)] * counts
    plain = losses(0.0)
    mean = plain.sum() / weights.sum()
    return mean + (losses(z_loss) - plain).sum() / counts.sum() if z_loss else mean


def gradient_terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """How large the terms of dx, dweight and dbias are, as the root of their squares' sum: where all rows of x are one row, a
    class's gradient may cancel altogether, and what rounds is its terms."""
    x, weight, target, bias = (arguments[name] for name in ("x", "weight", "target", "bias"))
    options = {name: arguments[name] for name in Options._fields}
    with torch.enable_grad():
        logits = F.linear(x, weight, bias).detach().requires_grad_()
        out = loss.reference(logits, target, weight=arguments["class_weight"], **options)
        squares = torch.autograd.grad(out, logits, gradients[0])[0].square_()
    found = [squares @ weight.square(), squares.t() @ x.square(), *([squares.sum(0)] if bias is not None else [])]
    return [f.sqrt() for f in found]


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x and a weight that make logits of about unit variance, and a bias unless the option says no. Options as cross
    entropy's, where ``weight`` (of the classes) is ``class_weight``; ``chunk`` is ``chunk_rows``, ``accumulate`` a dtype."""
    t, d, v = w["T"], w["D"], w["V"]
    x, layout = drawn(w, g, device, t, d), w.option("layout", "contiguous")
    of_weight = "contiguous" if layout == "expanded" else layout  # equal rows would make all logits of a row equal
    weight = random_tensor(g, (v, d), w.dtype, device, layout=of_weight).mul_(max(d, 1) ** -0.5)
    of_class_dtype = w.option("weight_dtype", w.dtype)
    of_class = random_tensor(g, (v,), of_class_dtype, device).abs_() if w.option("class_weight") else None
    return {
        "x": x,
        "weight": weight,
        "target": loss.inputs(_as_logits(w), g, device)["target"],
        "bias": random_tensor(g, (v,), w.dtype, device) if w.option("bias", True) else None,
        "class_weight": of_class,
        **loss.asked_of(w),
        "chunk_rows": w.option("chunk"),
        "accumulate": torch_dtype(w.option("accumulate")) if w.option("accumulate") else None,
    }


def _as_logits(w: Workload) -> Workload:
    kept = {name: w.options[name] for name in ("labels", "ignored") if name in w.options}
    return Workload({"M": w["T"], "V": w["V"]}, w.dtype, kept)


OPTIONS = {
    **{name: values for name, values in loss.OPTIONS.items() if name != "weight"},
    "bias": (True, False),
    "class_weight": (True, False),
    "chunk": range(1, 2**20),
    "accumulate": ("fp32", "fp16", "bf16"),
}


def cost_of(w: Workload, products: int, forward: bool) -> Cost:
    """Compulsory: x, weight and labels once, the results once, and the products. Logits are no traffic that must be."""
    t, d, v, s = w["T"], w["D"], w["V"], w.bytes_per_element
    operands = (t * d + v * d + (v if w.option("bias", True) else 0)) * s
    losses = (t if w.option("reduction") == "none" else 1) * s
    labels = t * (4 if w.option("labels") == "int32" else 8)
    writes = (losses if forward else 0) + (operands if products > 1 else 0)
    return Cost(
        reads=operands + labels + (0 if forward else losses),
        writes=writes,
        matrix_flops={w.dtype: 2.0 * products * t * d * v},
        vector_flops=4.0 * t * v,
        special_ops=1.0 * t * v,
    )


def _of_logits(wrong: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A wrong cross entropy of the right logits."""

    def mutant(
        x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None, **options: Any
    ) -> Tensor:
        logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        asked = {name: options[name] for name in Options._fields}
        return wrong(logits, target, weight=class_weight, **asked)

    return mutant


def _last_of_d_left_out(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    kept = max(x.shape[1] - 1, 0) // 8 * 8
    return reference(x[:, :kept], weight[:, :kept], target, **options)


def _each_chunk_divides(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The mean as the mean of two chunks' means."""
    half = (x.shape[0] + 1) // 2
    if options.get("reduction") != "mean" or x.shape[0] == half:
        return reference(x, weight, target, **options)
    first = reference(x[:half], weight, target[:half], **options)
    return (first + reference(x[half:], weight, target[half:], **options)) / 2


def _bias_left_out(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    out = reference(x, weight, target, **{**options, "bias": None})
    # autograd still asks for a gradient of the bias
    return out if options.get("bias") is None else out + 0 * options["bias"].sum().to(out.dtype)


WRONG: dict[str, Callable[..., Tensor]] = {
    "last of D left out": _last_of_d_left_out,
    "each chunk divides": _each_chunk_divides,
    "bias left out": _bias_left_out,
    **{
        name.replace("weight", "class weight"): _of_logits(wrong)
        for name, wrong in loss.WRONG.items()
        if name != "ignored rows divide"
    },
}

EVERYTHING = {"class_weight": True, "smoothing": 10, "z": 10, "cap": 5, "ignored": 30}
HEADS = ((8192, 4096, 128256), (8192, 2048, 32000), (4096, 3584, 256000))  # Llama 3 8B; a small Llama 2; Gemma 2 9B


def head(t: int, d: int, v: int, **options: Any) -> Workload:
    """As decoders have them: without a bias."""
    return workload("bf16", T=t, D=d, V=v, bias=False, **options)


def workloads() -> dict[str, list[Workload]]:
    llama = HEADS[0]
    return {
        "verify": [
            *(workload(T=t, D=d, V=v) for t, d, v in ((1, 1, 1), (5, 8, 33), (37, 40, 100), (2, 16, 300))),
            workload(T=9, D=24, V=40, reduction="sum", bias=False),
            *(workload(T=t, D=d, V=7, reduction="sum") for t, d in ((0, 4), (3, 0))),
            *(workload(T=9, D=16, V=33, layout=layout) for layout in LAYOUTS[1:] if layout != "sliced"),
            workload(T=40, D=16, V=50, ignored=40, chunk=16),
            workload(T=40, D=33, V=50, chunk=15, reduction="none", z=10),
            workload(T=4, D=8, V=50, ignored=100, reduction="none"),
            workload(T=6, D=16, V=40, labels="int32", class_weight=True, weight_dtype="fp32", reduction="none"),
            workload(T=20, D=16, V=50, smoothing=10, ignored=30, bias=False),
            workload(T=20, D=32, V=50, cap=2),
            workload(T=30, D=24, V=70, chunk=16, **EVERYTHING),
            workload("fp16", T=40, D=16, V=50, chunk=15, reduction="sum", accumulate="fp32"),
            workload(T=6, D=20, V=33, values="nonfinite", reduction="none"),
        ],
        "full": [
            workload(T=300, D=512, V=33000, ignored=20, z=1, smoothing=10, chunk=128),
            workload(T=70, D=300, V=128256, cap=30),
            workload(T=70, D=64, V=17001, ignored=20, z=1),
            workload(T=3000, D=64, V=1000, chunk=500),
            workload(T=30, D=24, V=70, chunk=16, reduction="none", **EVERYTHING),
        ],
        "huge": [head(2**14 + 1, 64, 2**17 + 8)],
        "bench": [head(*sizes) for sizes in HEADS],
        "quick": [workload(T=256, D=1024, V=1000)],
        "chunks": [
            *(head(*llama, chunk=c) for c in (512, 1024, 2048, 4096, 8192)),
            head(*llama, chunk=512, accumulate="bf16"),
        ],
        "options": [head(*llama, **{o: n}) for o, n in (("z", 1), ("smoothing", 10), ("cap", 30))],
        "compile": [workload(T=64, D=100, V=1000), head(*llama), workload(T=256, D=256, V=4096, **EVERYTHING)],
        "tune": [head(*sizes) for sizes in (*HEADS, (64, 4096, 128256), (1024, 4096, 128256))],
        "model": [head(*llama), head(4096, 5120, 151936)],
    }


def few_workloads() -> dict[str, list[Workload]]:
    """For what shares its kernels with the loss that autograd differentiates: those in which the two may differ."""
    every = workloads()
    kept = [w for w in every["verify"] if {"chunk", "accumulate"} & set(w.options) or not w.options or w["D"] == 0]
    return {**every, "verify": kept}


def of_whole_rows(t: Tensor) -> Tensor:
    """A copy with zeros up to a multiple of 16 bytes."""
    return padded.copied_to(t, t.shape[0], padded.up_to(t.shape[1]))


def loss_alone(call: LinearCall) -> Tensor:
    """Without a logit in memory."""
    call = (
        call if call.aligned else dataclasses.replace(call, x=of_whole_rows(call.x), weight=of_whole_rows(call.weight))
    )
    tensors = call.x, call.weight, call.x if call.bias is None else call.bias, call.target, call.w
    has = (call.bias is not None, call.class_weight is not None)
    return loss_plans.of(tensors, call.options, *has, default_precision())(*tensors)


class LinearCrossEntropy(KernelFunction):
    """``how``: ``chunked``, the gradients are made with the loss and saved; backward multiplies them by the loss's gradient on
    the device, unless that is 1, and returns them once: a second backward (a retained graph) computes them again. ``held``,
    logits of one chunk are saved, or their gradient. ``triton``, logits are computed again in backward, a product more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, how: str) -> Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        ctx.made, ctx.overwritten = None, False
        ctx.how = how if any(wanted) or how == "triton" else "chunked"
        held: list[Tensor] = []
        if ctx.how == "chunked" and any(wanted) and call.options.reduction == "none":
            raise Declined("each row's factor comes only in backward: gradients cannot be made with the losses")
        if ctx.how == "held" and not call.one_chunk:
            raise Declined(f"logits of {call.x.shape[0]} tokens, of which {call.rows} are in memory at once")
        ctx.asked = (call.options, call.chunk_rows, call.accumulate)
        if ctx.how == "chunked":
            loss, ctx.made = loss_and_gradients(call, wanted)
        elif ctx.how == "held":
            loss, *held = loss_and_logits(call)
        else:
            loss = loss_alone(call)
        ctx.save_for_backward(x, weight, call.target, bias, call.class_weight, *held)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, target, bias, class_weight, *held = ctx.saved_tensors
        call = LinearCall(x, weight, target, bias, class_weight, *ctx.asked)
        wanted = tuple(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            named = {**call.options._asdict(), "class_weight": class_weight}

            def loss_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return reference(x, weight, target, bias=bias, **named)

            return (*reference_gradients(loss_of, (x, weight, bias), wanted, (dloss,)), None, None)
        if held and not ctx.overwritten:
            keep = torch._C._autograd._get_current_graph_task_keep_graph()  # the graph is retained
            ctx.overwritten = call.scaled_later and not keep
            logits, stats = held
            return (*gradients_of_logits(call, logits, stats, dloss, wanted, keep), None, None)
        if ctx.how != "chunked":
            return (*gradients_of_losses(call, dloss, wanted), None, None)
        made, ctx.made = ctx.made, None
        if made is None:
            made = loss_and_gradients(call, wanted)[1]
        return (*scaled(made, dloss), None, None)


def launchable(c: LinearCall) -> LinearCall:
    """Raises Declined where there is nothing to launch."""
    if c.empty:
        raise Declined("empty: nothing to launch")
    return c


def ours(how: str, x: Tensor, weight: Tensor, target: Tensor, **named: Any) -> Tensor:
    call = launchable(linear_call(x, weight, target, **named))
    return differentiable(LinearCrossEntropy, call.x, call.weight, call.bias, call, how)


def liger(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    chunk_rows: int | None = None, accumulate: dtype | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Its default: dweight summed in its own dtype over as many chunks as V / D."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    o = Options(**options)
    call = (bias, class_weight, o.ignore_index, o.z_loss, o.label_smoothing, o.reduction, o.soft_cap)
    return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target, *call)[0].float()


def quack(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    chunk_rows: int | None = None, accumulate: dtype | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Its default: chunks of 4096 tokens, dweight summed in fp32."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    o = Options(**options)
    unknown = (o.label_smoothing, o.z_loss, o.soft_cap, o.reduction == "none")
    if bias is not None or class_weight is not None or any(unknown):
        raise Declined("QuACK's has no bias, class weights, label smoothing, z-loss, soft cap or reduction 'none'")
    if x.dtype == torch.float32 or any(n % 8 for n in (*x.shape, weight.shape[0])):
        raise Declined("QuACK's takes 16-bit inputs whose sizes are multiples of 8")
    how = {"ignore_index": o.ignore_index, "reduction": o.reduction, "tuned": False}
    return chunked_linear_cross_entropy(x, weight, target, **how).float()


def epsilon(w: Workload) -> float:
    """Of the logits, which are rounded to the operands' dtype."""
    return float(torch.finfo(torch_dtype(w.dtype)).eps)


def cost(w: Workload, direction: str) -> Cost:
    return cost_of(w, 1, True) if direction == "forward" else cost_of(w, 3, False)


linear_cross_entropy = Operator(
    name="linear_cross_entropy",
    axes={"T": "tokens", "D": "hidden size", "V": "classes"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options=OPTIONS,
    differentiable=("x", "weight", "bias"),
    tolerance={
        "forward": Tolerance(scale="row", ulps=2.0, eps=epsilon, terms=lambda w: max(w.axes.values())),
        "backward": Tolerance(scale=gradient_terms, ulps=2.0, terms=lambda w: max(w.axes.values())),
    },
    workloads=workloads(),
    mutants=[
        *mutants.usual(reference),
        *(Mutant(name, function) for name, function in WRONG.items()),
        *mutants.usual(mutants.gradient_of(reference, *LEAVES), "backward"),
        *(Mutant(name, mutants.gradient_of(function, *LEAVES), "backward") for name, function in WRONG.items()),
    ],
)

for _name in ("triton", "chunked", "held"):
    linear_cross_entropy.implementation(_name, backend="triton", arch=">=sm_80")(functools.partial(ours, _name))
peers.register(linear_cross_entropy, composed)
linear_cross_entropy.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)
linear_cross_entropy.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)


@linear_cross_entropy.choice
@guarded
def choose(
    x: Tensor, weight: Tensor, target: Tensor, *, check_labels: bool = False, direction: str = "forward", **named: Any
) -> Choice:
    tensors = (x, weight, named.get("bias"))
    wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    call = linear_call(x, weight, target, wanted=wanted or direction == "backward", **named)
    return LINEAR_FORWARD.choose("linear_cross_entropy", call, check_labels)


@linear_cross_entropy.function
def linear_cross_entropy_function(
    x: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float | None = None,
    reduction: str = "mean", chunk_rows: int | None = None, accumulate: dtype | None = None,
    check_labels: bool = False,
) -> Tensor:  # fmt: skip
    """Cross entropy of a linear layer's logits, x · weightᵀ + bias, of which at most 1 GiB is in memory.

    Args:
        x: [T, D], the last hidden states; float32, float16, bfloat16 or float64. Rows that are ignored must be finite: zero
            times NaN is NaN in the weight's gradient.
        weight: [V, D], as ``torch.nn.Linear`` keeps it, of x's dtype and device.
        target: [T], labels 0 … V - 1; int64 or int32.
        bias: [V], of x's dtype, or None.
        class_weight: [V], of each class, of x's dtype or float32; None for 1.
        ignore_index, label_smoothing, z_loss, soft_cap, reduction, check_labels: as of ``cross_entropy``.
        chunk_rows: tokens whose logits are in memory at once while gradients are made; None for as many as take 1 GiB.
        accumulate: the dtype that chunks' shares of the weight's gradient are summed in: x's (rounded once for each
            chunk) or float32 (4·V·D bytes more); None for x's up to 4 chunks, else float32.

    Returns:
        The loss, [] or with "none" [T], in float32 (float64 of float64). As in PyTorch, a mean over no label is NaN. Under
        autocast, where their dtypes may differ, x, weight and bias are cast as ``torch.nn.functional.linear`` casts them.

    Raises:
        TypeError: tensors of other dtypes, or dtypes that differ.
        ValueError: shapes, devices or options that do not fit; with ``check_labels``, a label out of range.

    In eager mode logits of one chunk stay in memory until backward. Of more chunks, the gradients of a mean or sum are made
    with the loss (three products in all), except for float16; else in backward, from logits that are made again (four).
    Without a gradient wanted logits are written a chunk at a time in float32 and where rows of x or weight do not begin on
    16 bytes, else none. A compiler sees one operator, whose gradients of a mean or sum are made with the loss; of float16 and
    of "none" it sees PyTorch's formulas, with all logits.
    """
    x, weight, bias = cast_for_products(x, weight, bias)
    options = Options(ignore_index, label_smoothing, z_loss, soft_cap, reduction)._asdict()
    named = {"bias": bias, "class_weight": class_weight, "chunk_rows": chunk_rows, "accumulate": accumulate, **options}
    chosen = choose(x, weight, target, check_labels=check_labels, **named).implementation
    if chosen == "torch":
        return reference(x, weight, target, **named)
    call = linear_call(x, weight, target, **named)
    if call.traced:
        return by_operator(call)
    return differentiable(LinearCrossEntropy, call.x, call.weight, call.bias, call, chosen)
