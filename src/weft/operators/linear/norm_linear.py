"""``norm_linear(x, weight, norm, ...)``: act(rms_norm(x) · weightᵀ + bias) + residual, for decoding in one launch.

2·M·N·K operations on N·K + M·(K + 2·N) elements: M operations a byte in 16 bits, so reading the weight is the limit, and for
few rows also the launches beside it, which this saves (README.md). No gradient of its own: PyTorch's operators have one.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, cast_for_products, eager, guarded, on_gpu
from weft.operators.linear import activations
from weft.operators.linear import reference as layer
from weft.operators.linear.activations import ACTIVATIONS
from weft.operators.linear.dispatch import NORM_LINEAR, flat
from weft.operators.random_inputs import LAYOUTS, VALUES, of_vectors, random_tensor

EPS = 1e-6


def reference(
    x: Tensor, weight: Tensor, norm: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None, *,
    eps: float = EPS, activation: str | None = None,
) -> Tensor:  # fmt: skip
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm, eps)
    return layer.composed(x, weight, bias, residual, activation)


def has(w: Workload, what: str) -> bool:
    return what in w.option("plus", "norm+bias+residual")


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [M, K], weight [N, K] ([2N, K] of a gated activation) with a variance of 1 / K, a norm's weight [K] around 1. Options:
    activation (none); plus, what there is besides (norm+bias+residual); layout, of all but the weight; values, of x."""
    layout, m, k = w.option("layout", "contiguous"), w["M"], w["K"]
    activation = layer.activation_of(w) if w.option("activation", "none") != "none" else None
    rows = w["N"] * (2 if activations.of(activation).gated else 1)

    def vector(size: int, wanted: str) -> Tensor | None:
        return random_tensor(g, (size,), w.dtype, device, layout=of_vectors(layout)) if has(w, wanted) else None

    call: dict[str, Any] = {
        "x": random_tensor(g, (m, k), w.dtype, device, layout=layout, values=w.option("values", "normal")),
        "weight": random_tensor(g, (rows, k), w.dtype, device).mul_(max(k, 1) ** -0.5),
        "norm": vector(k, "norm"), "bias": vector(rows, "bias"),
        "residual": random_tensor(g, (m, w["N"]), w.dtype, device, layout=layout) if has(w, "residual") else None,
    }  # fmt: skip
    return {**call, "eps": w.option("eps", EPS), "activation": activation}


def cost(w: Workload, direction: str) -> Cost:
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    name = w.option("activation", "none")
    rows = n * (2 if activations.of(None if name == "none" else name).gated else 1)
    reads = m * k + rows * k + has(w, "norm") * k + has(w, "bias") * rows + has(w, "residual") * m * n
    return Cost(reads * size, m * n * size, {w.dtype: 2.0 * m * rows * k})


def _of_part(x: Tensor, norm: Tensor | None, eps: float, **named: Any) -> Tensor:
    """The mean square without the last slice of K."""
    if norm is not None and x.numel():
        part = x[..., : max(x.shape[-1] - 1, 0) // 8 * 8]
        x = x * torch.rsqrt(part.square().sum(-1, keepdim=True) / x.shape[-1] + eps) * norm
    return reference(x, **named)


def _every_row_as_the_first(x: Tensor, **named: Any) -> Tensor:
    if named["norm"] is not None and x.numel():
        x = x * (x[:1].square().mean() + named["eps"]).rsqrt() * named["norm"]
    return reference(x, **{**named, "norm": None})


def _residual_normed(**named: Any) -> Tensor:
    if named["residual"] is None or named["norm"] is None:
        return reference(**named)
    r = named["residual"]
    return reference(**{**named, "residual": F.rms_norm(r, r.shape[-1:], None, named["eps"])})


SIZES = ((1, 40, 256), (1, 33, 130), (2, 9, 700))
# (N, K, plus, activation) of Llama 1B's and 8B's layers: queries, keys and values; output; gate and up; down
LAYERS = tuple(
    row
    for hidden, qkv, width in ((2048, 3072, 8192), (4096, 6144, 14336))
    for row in (
        (qkv, hidden, "norm", "none"),
        (hidden, hidden, "residual", "none"),
        (width, hidden, "norm", "swiglu"),
        (hidden, width, "residual", "none"),
    )
)


def of_layer(m: int, n: int, k: int, plus: str, activation: str, dtype: str = "bf16") -> Workload:
    return workload(dtype, M=m, N=n, K=k, plus=plus, activation=activation)


norm_linear = Operator(
    name="norm_linear",
    axes={"M": "rows of x", "N": "columns of y", "K": "columns of x and of weight"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        "activation": ("none", *ACTIVATIONS),
        "plus": ("norm+bias+residual", "norm+bias", "norm+residual", "bias+residual", "norm", "bias", "residual", "none"),
        "layout": LAYOUTS,
        "values": VALUES,
        "eps": (EPS, 0.1),
    },
    tolerance=Tolerance(scale="tensor", terms=lambda w: 2 * max(w.axes.values())),
    workloads={
        "verify": [
            *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), *SIZES, (5, 3, 40), (0, 5, 3), (5, 0, 3), (5, 3, 0))),
            *(workload(M=m, N=n, K=k, eps=0.1) for m, n, k in SIZES),
            *(workload(M=m, N=24, K=136, activation=name, plus="norm+bias") for m in (1, 3) for name in ACTIVATIONS),
            *(workload(M=m, N=40, K=k) for m, k in ((4, 264), (8, 1032), (13, 136), (17, 64))),
            *(workload(M=m, N=24, K=136, activation=a, plus=p) for m in (1, 2) for a in ("none", "swiglu")
              for p in ("norm", "residual", "norm+residual", "none")),
            *(workload(M=2, N=20, K=72, layout=at) for at in LAYOUTS[1:]),
            workload(M=2, N=20, K=64, values="nonfinite", plus="residual"),
        ],
        "full": [workload(M=m, N=1000, K=k, activation="swiglu") for k in (4100, 4104) for m in (1, 2, 11)],
        "huge": [
            *(workload("bf16", M=m, N=2**17 + 8, K=2**14 + 8) for m in (1, 2)),
            *(workload("bf16", M=m, N=40, K=2**26 + 64, plus="residual") for m in (1, 2)),
        ],
        "bench": [of_layer(m, *row) for m in (1, 2, 8, 16) for row in LAYERS],
        "quick": [of_layer(m, *LAYERS[-2]) for m in (1, 8)],
        "compile": [
            *(of_layer(m, *row) for m in (1, 8, 16) for row in LAYERS),
            of_layer(2, *LAYERS[0], dtype="fp32"),
            *(workload("fp16", M=m, N=500, K=1000) for m in (1, 3)),
        ],
        "model": [of_layer(m, *row) for m in (1, 8) for row in LAYERS],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("not normalised", mutants.changed(reference, norm=lambda t: None)),
        Mutant("norm's weight left out", mutants.changed(reference, norm=lambda t: None if t is None else torch.ones_like(t))),
        Mutant("another eps", mutants.changed(reference, eps=lambda eps: 0.0)),
        Mutant("last slice of K not squared", lambda **named: _of_part(**named)),
        Mutant("every row by the first one's norm", _every_row_as_the_first),
        Mutant("residual normalised", _residual_normed),
        Mutant("bias left out", mutants.changed(reference, bias=lambda t: None)),
        Mutant("residual left out", mutants.changed(reference, residual=lambda t: None)),
    ],
)  # fmt: skip


def arguments(
    x: Tensor, weight: Tensor, norm: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
    activation: str | None,
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:  # fmt: skip
    """The tensors, any for those that there are not, and the options of a call."""
    tensors = (x, weight, *(x if t is None else t for t in (norm, bias, residual)))
    return tensors, (norm is not None, bias is not None, residual is not None, eps, activation)


def _launched(plan: Any, tensors: tuple[Tensor, ...], activation: str | None) -> Tensor:
    x, weight, *_ = tensors
    n = weight.shape[0] // (2 if activations.of(activation).gated else 1)
    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    plan(*tensors, y)
    return y


def by_kernel(
    name: str, x: Tensor, weight: Tensor, norm: Tensor | None = None, bias: Tensor | None = None,
    residual: Tensor | None = None, *, eps: float = EPS, activation: str | None = None,
) -> Tensor:  # fmt: skip
    tensors, options = arguments(x, weight, norm, bias, residual, eps, activation)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise Declined("a gradient is wanted, which the kernel does not keep anything for")
    if not on_gpu(x) or not flat(x).shape[0] * len(weight):
        return reference(x, weight, norm, bias, residual, eps=eps, activation=activation)
    return _launched(NORM_LINEAR.kernel(name).of(tensors, *options), tensors, activation)


norm_linear.implementation("triton", arch=">=sm_80")(functools.partial(by_kernel, "triton"))
norm_linear.implementation("cuda", arch=">=sm_90", dtypes=("fp16", "bf16"), devices=("cuda",))(
    functools.partial(by_kernel, "cuda")
)


peers.register(norm_linear, reference)


@norm_linear.choice
@guarded
def choose(
    x: Tensor, weight: Tensor, norm: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None, *,
    eps: float = EPS, activation: str | None = None,
) -> Choice:  # fmt: skip
    x, weight, norm, bias, residual = cast_for_products(x, weight, norm, bias, residual)
    operands, options = arguments(x, weight, norm, bias, residual, eps, activation)
    choice = NORM_LINEAR.choose(*operands, *options)
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return Choice("torch", "a gradient is wanted: PyTorch's operators have one")
    return choice


@norm_linear.function
def norm_linear_function(
    x: Tensor, weight: Tensor, norm: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None, *,
    eps: float = EPS, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """A linear layer behind an RMSNorm, with activation and residual: act(rms_norm(x) · weightᵀ + bias) + residual.

    Args:
        x: [..., K]; float32, float16 or bfloat16, any strides. One row, and from sm_90 on up to 16 of 16 bits
            (K a multiple of 8), are one launch; others go to PyTorch.
        weight: [N, K], of x's dtype and device; of a gated activation [2N, K], the gate's rows first. Contiguous along K.
        norm: [K], the norm's weight; None for x as it is.
        bias: [N], or [2N] of a gated activation; None for none.
        residual: [..., N], added last; None for none.
        eps: added to the mean of x².
        activation: as of ``linear``, or None.

    Returns:
        [..., N] of x's dtype. In one launch all is computed in fp32 and rounded once, but for x times the norm's weight,
        which tensor cores take in 16 bits: neither what is normalised is rounded before the product, nor the product before
        the residual is added. Under autocast all tensors are cast as ``torch.nn.functional.linear`` does.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: shapes or devices that do not fit, a negative eps, or an unknown activation.
    """
    tensors, options = arguments(x, weight, norm, bias, residual, eps, activation)
    if eager(*tensors) and (plan := NORM_LINEAR.of(tensors, *options)) is not None:
        return _launched(plan, tensors, activation)
    x, weight, norm, bias, residual = cast_for_products(x, weight, norm, bias, residual)
    named: dict[str, Any] = {"eps": eps, "activation": activation}
    chosen = choose(x, weight, norm, bias, residual, **named).implementation
    if chosen == "torch":
        return reference(x, weight, norm, bias, residual, **named)
    return by_kernel(chosen, x, weight, norm, bias, residual, **named)
