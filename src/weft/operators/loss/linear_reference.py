"""What linear cross entropy and the one with its gradients share: reference, inputs, cost, workloads, and ways to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.definition import Cost, Workload, torch_dtype, workload
from weft.operators.loss import reference as loss
from weft.operators.random_inputs import random_tensor

OF_THE_LOSS = ("ignore_index", "label_smoothing", "z_loss", "soft_cap", "reduction")  # that cross entropy has too
AT_ONCE = 2**28  # logits that the reference holds; more are made again for the gradient


def composed(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    **o: Any,
) -> Tensor:
    """What a user of PyTorch writes; all logits [T, V] lie in memory."""
    return loss.composed(F.linear(x, weight, bias), target, weight=class_weight, **o)


def reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    **o: Any,
) -> Tensor:
    """In fp32 or wider, rounded once."""
    dtype = x.dtype
    if dtype != torch.float64:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    rows = max(AT_ONCE // max(weight.shape[0], 1), 1)
    if x.shape[0] <= rows:
        return loss.reference(F.linear(x, weight, bias), target, weight=class_weight, **o).to(dtype)
    return _by_parts(x, weight, target, bias, class_weight, rows, **o).to(dtype)


def _by_parts(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, of_class: Tensor | None, rows: int, *,
    reduction: str = "mean", z_loss: float = 0.0, ignore_index: int = -100, **o: Any,
) -> Tensor:  # fmt: skip
    """The mean divides the parts' sums: of the losses by the labels' weights, of the z-losses by the labels' number."""

    def part(x: Tensor, target: Tensor, z: float) -> Tensor:
        logits = F.linear(x, weight, bias)
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


def gradients(dloss: Tensor, x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Of x, the weight and the bias, where there is one."""
    return gradients_of(reference, dloss, x, weight, target, **options)


def gradients_of(
    function: Callable[..., Tensor], dloss: Tensor | None, x: Tensor, weight: Tensor, target: Tensor, *,
    bias: Tensor | None = None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return loss_and_gradients_of(function, dloss, x, weight, target, bias=bias, **options)[1]


def loss_and_gradients_of(
    function: Callable[..., Tensor], dloss: Tensor | None, x: Tensor, weight: Tensor, target: Tensor, *,
    bias: Tensor | None = None, **options: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """The loss and its gradients by autograd (of the losses' sum where ``dloss`` is None)."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        out = function(leaves[0], leaves[1], target, bias=leaves[2] if bias is not None else None, **options)
        found = torch.autograd.grad(out, leaves, torch.ones_like(out) if dloss is None else dloss)
    return out.detach(), found


def gradient_terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """How large the terms of dx, dweight and dbias are, as the root of their squares' sum: where all rows of x are one row, a
    class's gradient may cancel altogether, and what rounds is its terms."""
    x, weight, target, bias = (arguments[name] for name in ("x", "weight", "target", "bias"))
    options = {name: value for name, value in arguments.items() if name in OF_THE_LOSS}
    with torch.enable_grad():
        logits = F.linear(x, weight, bias).detach().requires_grad_()
        out = loss.reference(logits, target, weight=arguments["class_weight"], **options)
        squares = torch.autograd.grad(out, logits, gradients[0])[0].square_()
    found = [squares @ weight.square(), squares.t() @ x.square(), *([squares.sum(0)] if bias is not None else [])]
    return [f.sqrt() for f in found]


# ---- inputs ----------------------------------------------------------------------------------------------------------


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x and a weight that make logits of about unit variance, and a bias unless the option says no. Options as cross
    entropy's, where ``weight`` (of the classes) is ``class_weight``; ``chunk`` is ``chunk_rows``, ``accumulate`` a dtype."""
    t, d, v = w["T"], w["D"], w["V"]
    layout = w.option("layout", "contiguous")
    x = random_tensor(g, (t, d), w.dtype, device, layout=layout, values=w.option("values", "normal"))
    of_weight = "contiguous" if layout == "expanded" else layout  # equal rows would make all logits of a row equal
    weight = random_tensor(g, (v, d), w.dtype, device, layout=of_weight).mul_(max(d, 1) ** -0.5)
    of_class = (
        random_tensor(g, (v,), w.option("weight_dtype", w.dtype), device).abs_() if w.option("class_weight") else None
    )
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


def cost(w: Workload, products: int, forward: bool) -> Cost:
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


# ---- wrong on purpose ------------------------------------------------------------------------------------------------


def _of_logits(wrong: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A wrong cross entropy of the right logits."""

    def mutant(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        bias, of_class = options.pop("bias", None), options.pop("class_weight", None)
        logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wrong(logits, target, weight=of_class, **options).to(x.dtype)

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
    return ((first + reference(x[half:], weight, target[half:], **options)) / 2).to(x.dtype)


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

# ---- workloads -------------------------------------------------------------------------------------------------------

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
            *(workload(T=9, D=16, V=33, layout=at) for at in ("unaligned", "strided", "transposed", "expanded")),
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
