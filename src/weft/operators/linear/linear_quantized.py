"""``linear_quantized(x, weight, bias, scale=...)``: a linear layer whose result leaves as 8-bit codes of a given scale.

Delayed scaling (Micikevicius et al. 2022, arXiv 2209.05433): the scale comes from the largest values of earlier steps, so the
result is quantised while it is in registers, and its own largest value comes back for the next step's scale.
"""

import functools
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Cost, Mutant, Operator, Tolerance, Workload, torch_dtype, workload
from weft.operators import mutants, peers
from weft.operators.call import Choice, cast_for_products, guarded
from weft.operators.hopper.gemm import ON_HOPPER
from weft.operators.linear import activations
from weft.operators.linear import reference as linear
from weft.operators.linear.dispatch import QUANTIZED
from weft.operators.linear.reference import E4M3, NAMES
from weft.operators.matmul.dispatch import default_precision
from weft.operators.quantization.formats import FORMATS, format_of, inverse_of, rounded
from weft.operators.random_inputs import LAYOUTS, VALUES

Quantized = tuple[Tensor, Tensor]  # codes, the largest |y|


def reference(*call: Any, scale: Tensor, dtype: torch.dtype = E4M3, **named: Any) -> Quantized:
    """Of ``linear``'s arguments, less the residual."""
    return _quantized(linear.reference(*call, **named), scale, dtype)


def usual(*call: Any, scale: Tensor, dtype: torch.dtype = E4M3, **named: Any) -> Quantized:
    """What a user of PyTorch writes: y is rounded to x's dtype before it is quantised."""
    return _quantized(linear.composed(*call, **named), scale, dtype)


def _quantized(y: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantized:
    """In fp32. Of float64 tensors codes are numbers that are not rounded, which errors are taken against."""
    y, format = y.detach(), format_of(dtype)
    wide = y if y.dtype == torch.float64 else y.float()
    amax = wide.abs().amax().reshape(1) if y.numel() else wide.new_zeros(1)
    if y.dtype == torch.float64:
        return (wide / scale).clamp(-FORMATS[format].largest, FORMATS[format].largest), amax
    return rounded(wide * inverse_of(scale.detach().reshape(())), format), amax


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """As of ``linear``, with a scale at which the largest of some numbers saturate."""
    drawn = linear.inputs(w, g, device)
    del drawn["residual"]
    format = w.option("format", "fp8_e4m3")
    scale = torch.full((1,), 2.5 / FORMATS[format].largest, dtype=torch.float32, device=device)
    return {**drawn, "scale": scale, "dtype": FORMATS[format].dtype}


def cost(w: Workload, direction: str) -> Cost:
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    rows = n * (2 if linear.gated(w) else 1)
    bias = rows if "bias" in w.option("plus", "bias") else 0
    return Cost((m * k + rows * k + bias) * size + 4, m * n + 4, {w.dtype: 2.0 * m * rows * k})


def _amax_after_saturation(scale: Tensor, dtype: torch.dtype, **named: Any) -> Quantized:
    q, amax = reference(scale=scale, dtype=dtype, **named)
    return q, amax.minimum(FORMATS[format_of(dtype)].largest * scale)


def _amax_of_the_first_rows(x: Tensor, **named: Any) -> Quantized:
    q, amax = reference(x, **named)
    return (q, reference(x[:1], **named)[1]) if x.shape[0] > 1 else (q, amax)


def _towards_zero(scale: Tensor, dtype: torch.dtype, **named: Any) -> Quantized:
    """Integers."""
    q, amax = reference(scale=scale, dtype=dtype, **named)
    if dtype != torch.int8:
        return q, amax
    return (linear.reference(**named).float() / scale).clamp(-127, 127).trunc().nan_to_num().to(torch.int8), amax


linear_quantized = Operator(
    name="linear_quantized",
    axes={"M": "rows of x", "N": "columns of y", "K": "columns of x and of weight"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options={
        **{name: linear.OPTIONS[name] for name in ("activation", "layout")},
        "plus": ("bias", "none"),
        "format": NAMES,
        "memory": LAYOUTS,
        "values": VALUES,
    },
    # the largest |y| is fp32, but may be of results in x's dtype, rounded up to four times: gate, up, activation, product
    tolerance=Tolerance(
        scale="tensor",
        ulps=2.0,
        eps=lambda w: torch.finfo(torch_dtype(w.dtype)).eps,
        terms=lambda w: max(w.axes.values()),
        neighbours=0.25,
    ),
    workloads={
        "verify": [
            *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), (33, 65, 17), (64, 72, 64), (7, 1, 130))),
            *(workload(M=m, N=n, K=k) for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0))),
            *(workload(**linear.SMALL, activation=name, format=f) for name in ("none", "gelu") for f in NAMES),
            *(workload(**linear.SMALL, activation=name, plus="none") for name in ("relu", "swiglu", "geglu_tanh")),
            *(workload(M=40, N=48, K=32, memory=memory) for memory in ("unaligned", "sliced", "strided")),
            workload(**linear.SMALL, layout="TN"),
            *(workload(M=32, N=48, K=16, values="nonfinite", activation="none", plus="none", format=f) for f in NAMES),
        ],
        "full": [workload(M=257, N=264, K=520, activation=name) for name in ("none", "gelu_tanh", "swiglu")],
        "bench": [
            linear.up(m, n, k, name, plus)
            for m, (n, k) in ((4096, linear.UP[0]), (16384, linear.UP[0]), (4096, linear.UP[1]))
            for name, plus in (("gelu_tanh", "bias"), ("swiglu", "none"))
        ],
        "quick": [linear.up(4096, 4096, 4096, "gelu_tanh", "bias")],
        "compile": [
            workload("fp32", M=512, N=512, K=500, activation="silu"),
            linear.up(4096, *linear.UP[0], "gelu_tanh", "bias"),
            linear.up(4096, *linear.UP[0], "swiglu", "none"),
            workload("fp16", M=512, N=512, K=500, format="int8"),
        ],
        "tune": [linear.up(4096, n, n, "gelu_tanh", "bias") for n in (4096, 8192)],
    },
    mutants=[
        *mutants.usual(reference),
        Mutant("scale inverted", mutants.changed(reference, scale=lambda scale: 1 / scale)),
        Mutant("largest value after saturation", _amax_after_saturation),
        Mutant("largest value of the first row", _amax_of_the_first_rows),
        Mutant("rounded towards zero", _towards_zero),
        Mutant("bias left out", mutants.changed(reference, bias=lambda bias: None)),
    ],
)


def arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor, dtype: Any = E4M3, activation: Any = None
) -> tuple[Any, tuple[Any, ...]]:
    """The tensors and the options of a :class:`QuantizedCall`."""
    return (x, weight, x if bias is None else bias, scale), (bias is not None, activation, dtype)


@torch.no_grad()
def by_kernel(name: str | None, *call: Any, **named: Any) -> Quantized:
    """By the kernel of that name, or by the one that the table chooses."""
    plans = QUANTIZED if name is None else QUANTIZED.kernel(name)
    tensors, options = arguments(*call, **named)
    (x, weight, *_), (_, activation, dtype) = tensors, options
    n = weight.shape[0] // (2 if activations.of(activation).gated else 1)
    q = torch.empty((*x.shape[:-1], n), dtype=torch.uint8, device=x.device)
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    if q.numel():
        plans.of(tensors, *options, default_precision())(*tensors, q, amax)
    return q.view(dtype), amax


for _name in ("triton", "epilogue"):
    linear_quantized.implementation(_name, backend="triton", arch=">=sm_80")(functools.partial(by_kernel, _name))
for _name in ("cuda", "cuda-unfused"):
    linear_quantized.implementation(_name, backend="cuda", **ON_HOPPER)(functools.partial(by_kernel, _name))
peers.register(linear_quantized, usual)


@linear_quantized.choice
@guarded
def choose(*call: Any, **named: Any) -> Choice:
    (*operands, scale), options = arguments(*call, **named)
    return QUANTIZED.choose(*cast_for_products(*operands), scale, *options)


@linear_quantized.function
def linear_quantized_function(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scale: Tensor, dtype: dtype = E4M3,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A linear layer's result as 8-bit codes of a given scale, and its largest value: delayed scaling.

    Args:
        x, weight, bias, activation: as of ``weft.ops.linear``, which gives y.
        scale: float32, [1] or []: what a code of 1 stands for. Commonly the largest |y| of earlier steps divided by the dtype's
            largest value. Its value is not looked at: of zero, NaN or an infinity codes are what y · (1 / scale) makes of them.
        dtype: of the codes: float8_e4m3fn (± 448), float8_e5m2 (± 57344) or int8 (± 127).

    Returns:
        (q, amax). q [..., N]: y · (1 / scale), held within ± the dtype's largest value and rounded to nearest, ties to even, as
        ``weft.ops.quantize`` does it; of NaN it is NaN, and 0 in int8. amax, float32 [1]: the largest |y| before any rounding;
        NaN if any y is.

    Raises:
        TypeError: tensors of other dtypes, or another ``dtype``.
        ValueError: shapes or devices that do not fit, or an unknown activation.

    Results have no gradient. Where PyTorch's product is taken, and where codes are made in a second launch
    (``weft.ops.explain``), y is rounded to x's dtype first.
    """
    named: dict[str, Any] = {"scale": scale, "dtype": dtype, "activation": activation}
    x, weight, bias = cast_for_products(x, weight, bias)
    if choose(x, weight, bias, **named).implementation != "torch":
        return by_kernel(None, x, weight, bias, **named)
    return (usual if x.is_cuda else reference)(x, weight, bias, **named)
