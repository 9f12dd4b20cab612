"""The definition of a linear layer whose result leaves as 8-bit codes: reference, inputs, cost, workloads, mutants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Workload, workload
from weft.operators import mutants
from weft.operators.linear import linear_definition
from weft.operators.linear.linear_definition import UP, composed, gated
from weft.operators.quantization.formats import FORMATS, format_of, inverse_of, rounded
from weft.operators.random_inputs import LAYOUTS, VALUES

E4M3 = torch.float8_e4m3fn
NAMES = ("fp8_e4m3", "fp8_e5m2", "int8")
Quantized = tuple[Tensor, Tensor]  # codes, the largest |y|
OPTIONS = {
    **{name: linear_definition.OPTIONS[name] for name in ("activation", "layout")},
    "plus": ("bias", "none"),
    "format": NAMES,
    "memory": LAYOUTS,
    "values": VALUES,
}


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor,
    dtype: torch.dtype = E4M3,
    activation: str | None = None,
) -> Quantized:
    return _quantized(linear_definition.reference(x, weight, bias, activation=activation), scale, dtype)


def usual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor,
    dtype: torch.dtype = E4M3,
    activation: str | None = None,
) -> Quantized:
    """What a user of PyTorch writes: y is rounded to x's dtype before it is quantised."""
    return _quantized(composed(x, weight, bias, activation=activation), scale, dtype)


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
    drawn = linear_definition.inputs(w, g, device)
    del drawn["residual"]
    format = w.option("format", "fp8_e4m3")
    scale = torch.full((1,), 2.5 / FORMATS[format].largest, dtype=torch.float32, device=device)
    return {**drawn, "scale": scale, "dtype": FORMATS[format].dtype}


def cost(w: Workload, direction: str) -> Cost:
    m, n, k, size = w["M"], w["N"], w["K"], w.bytes_per_element
    rows = n * (2 if gated(w) else 1)
    bias = rows if "bias" in w.option("plus", "bias") else 0
    return Cost((m * k + rows * k + bias) * size + 4, m * n + 4, {w.dtype: 2.0 * m * rows * k})


def _scale_inverted(*call: Any, scale: Tensor, **named: Any) -> Quantized:
    return reference(*call, scale=1 / scale, **named)


def _amax_after_saturation(*call: Any, scale: Tensor, dtype: torch.dtype = E4M3, **named: Any) -> Quantized:
    q, amax = reference(*call, scale=scale, dtype=dtype, **named)
    return q, amax.minimum(FORMATS[format_of(dtype)].largest * scale)


def _amax_of_the_first_rows(x: Tensor, *call: Any, **named: Any) -> Quantized:
    q, amax = reference(x, *call, **named)
    return (q, reference(x[:1], *call, **named)[1]) if x.shape[0] > 1 else (q, amax)


def _towards_zero(*call: Any, scale: Tensor, dtype: torch.dtype = E4M3, **named: Any) -> Quantized:
    """Integers."""
    q, amax = reference(*call, scale=scale, dtype=dtype, **named)
    if dtype != torch.int8:
        return q, amax
    y = linear_definition.reference(*call, **named)
    return (y.float() / scale).clamp(-127, 127).trunc().nan_to_num().to(torch.int8), amax


def _no_bias(x: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any) -> Quantized:
    return reference(x, weight, None, **named)


def up(m: int, n: int, k: int, activation: str, plus: str) -> Workload:
    return workload("bf16", M=m, N=n, K=k, activation=activation, plus=plus)


SMALL: dict[str, Any] = {"M": 40, "N": 48, "K": 72}
WORKLOADS = {
    "verify": [
        *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), (33, 65, 17), (64, 72, 64), (7, 1, 130))),
        *(workload(M=m, N=n, K=k) for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0))),
        *(workload(**SMALL, activation=name, format=f) for name in ("none", "gelu") for f in NAMES),
        *(workload(**SMALL, activation=name, plus="none") for name in ("relu", "swiglu", "geglu_tanh")),
        *(workload(M=40, N=48, K=32, memory=memory) for memory in ("unaligned", "sliced", "strided")),
        workload(**SMALL, layout="TN"),
        *(workload(M=32, N=48, K=16, values="nonfinite", activation="none", plus="none", format=f) for f in NAMES),
    ],
    "full": [workload(M=257, N=264, K=520, activation=name) for name in ("none", "gelu_tanh", "swiglu")],
    "bench": [
        up(m, n, k, name, plus)
        for m, (n, k) in ((4096, UP[0]), (16384, UP[0]), (4096, UP[1]))
        for name, plus in (("gelu_tanh", "bias"), ("swiglu", "none"))
    ],
    "quick": [up(4096, 4096, 4096, "gelu_tanh", "bias")],
    "compile": [
        workload("fp32", M=512, N=512, K=500, activation="silu"),
        up(4096, *UP[0], "gelu_tanh", "bias"),
        up(4096, *UP[0], "swiglu", "none"),
        workload("fp16", M=512, N=512, K=500, format="int8"),
    ],
    "tune": [up(4096, n, n, "gelu_tanh", "bias") for n in (4096, 8192)],
}

MUTANTS = [
    *mutants.usual(reference),
    Mutant("scale inverted", _scale_inverted),
    Mutant("largest value after saturation", _amax_after_saturation),
    Mutant("largest value of the first row", _amax_of_the_first_rows),
    Mutant("rounded towards zero", _towards_zero),
    Mutant("bias left out", _no_bias),
]
