"""The definition of products with a quantised weight: reference, inputs, cost, workloads, mutants."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Cost, Mutant, Workload, torch_dtype, workload
from weft.operators import mutants
from weft.operators.low_precision.quantized_weight import (
    BITS,
    GROUPS,
    QuantizedWeight,
    block,
    dequantize_weight,
    quantize_weight,
)
from weft.operators.random_inputs import LAYOUTS, VALUES, random_tensor

OPTIONS = {
    "format": tuple(BITS),
    "group": (0, *GROUPS),
    "zero": (False, True),
    "bias": (False, True),
    "layout": LAYOUTS,
    "values": VALUES,
}


def reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, dequantize_weight(weight, x.dtype), bias)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """x [M, K] and a weight [N, K] of normal random numbers, quantised. Options: ``format``, ``group`` (of int4 128, else whole
    rows), ``zero`` (int4 with zero points), ``bias``, ``layout`` (of x and the bias) and ``values`` (of x)."""
    m, n, k = (w[a] for a in "MNK")
    layout = w.option("layout", "contiguous")
    x = random_tensor(g, (m, k), w.dtype, device, layout=layout, values=w.option("values", "normal"))
    bias = None
    if w.option("bias", True):
        of_vectors = layout if layout in ("unaligned", "strided") else "contiguous"
        bias = random_tensor(g, (n,), w.dtype, device, layout=of_vectors)
    return {"x": x, "weight": _weight(w, g, device, n, k), "bias": bias}


def _form(w: Workload) -> tuple[str, int]:
    format = w.option("format", "int8")
    return format, w.option("group", 128 if format == "int4" else 0)


def _weight(w: Workload, g: Any, device: str, n: int, k: int) -> QuantizedWeight:
    (format, group), zero_points = _form(w), w.option("zero", False)
    if device != "meta":
        return quantize_weight(random_tensor(g, (n, k), w.dtype, device), format, group, zero_points=zero_points)
    words = torch.empty((n, -(-k // block(format)) * 64), dtype=torch.int32, device=device)
    if not group:
        return QuantizedWeight(words, torch.empty(n, device=device), None, format, 0, k)
    scale = torch.empty((k // group, n), dtype=torch_dtype(w.dtype), device=device).t()
    zero = torch.empty((k // group, n), dtype=torch.uint8, device=device).t() if zero_points else None
    return QuantizedWeight(words, scale, zero, format, group, k)


def cost(w: Workload, direction: str) -> Cost:
    (m, n, k), size, (format, group) = (w[a] for a in "MNK"), w.bytes_per_element, _form(w)
    bias = n if w.option("bias", True) else 0
    scales = n * (k // group) * (size + w.option("zero", False)) if group else n * 4
    reads = n * k * BITS[format] // 8 + scales + (m * k + bias) * size
    return Cost(reads, m * n * size, {w.dtype: 2.0 * m * n * k + m * bias})


def _with(weight: QuantizedWeight, **changed: Any) -> QuantizedWeight:
    return weight._replace(**changed)


def _last_block_left_out(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    k = max(x.shape[1] - 1, 0) // block(weight.format) * block(weight.format)
    return F.linear(x[:, :k], dequantize_weight(weight, x.dtype)[:, :k], bias)


def _halves_swapped(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    words = weight.words << 16 | weight.words >> 16 & 0xFFFF
    return reference(x, _with(weight, words=words), bias)


def _next_groups_scale(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return reference(x, _with(weight, scale=weight.scale.roll(1, -1)), bias)


def _zero_points_left_out(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return reference(x, _with(weight, zero=None), bias)


def quantised(dtype: str, m: int, n: int, k: int, format: str, group: int = 0, **options: Any) -> Workload:
    """As decoder layers are: without a bias."""
    return workload(dtype, M=m, N=n, K=k, format=format, group=group, bias=False, **options)


FORMS = (("int8", 0), ("fp8", 0), ("int4", 128))
DECODE = (1, 4, 8, 16, 32, 64)  # sequences that decode at once
# Llama 3 8B and 70B: queries, keys and values; output; gate and up; down
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (8192, 28672))

WORKLOADS = {
    "verify": [
        *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), (1, 40, 256), (3, 33, 17), (9, 16, 300), (33, 5, 70))),
        *(workload(M=m, N=n, K=k) for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (70, 9, 33))),
        *(workload(M=2, N=20, K=k, format="fp8") for k in (33, 256)),
        *(workload(M=3, N=20, K=384, format="int8", group=g) for g in GROUPS),
        workload(M=3, N=20, K=128, format="fp8", group=64),
        *(workload(M=2, N=20, K=k, format="int4", group=g) for k, g in ((512, 128), (640, 128), (192, 64), (96, 32))),
        *(workload(M=4, N=7, K=256, format="int4", group=g, zero=True) for g in GROUPS),
        workload(M=17, N=20, K=1152, format="int4", group=128, zero=True, bias=False),
        workload(M=64, N=66, K=256, format="int4", group=32, zero=True),
        *(workload(M=40, N=70, K=200, format=f) for f in ("int8", "fp8")),
        *(workload(M=3, N=20, K=72, layout=at) for at in LAYOUTS[1:]),
        *(workload(M=4, N=20, K=128, format=f, values="nonfinite") for f in BITS),
    ],
    "full": [workload(M=m, N=300, K=1280, format=f, group=g) for m in (1, 7, 64) for f, g in FORMS],
    "huge": [quantised("bf16", m, 2**17 + 8, 2**14 + 128, f, g) for m in (1, 16) for f, g in FORMS],
    "bench": [quantised("bf16", m, 8192, 8192, f, g) for f, g in FORMS for m in DECODE],
    "quick": [quantised("bf16", 1, 8192, 8192, f, g) for f, g in FORMS],
    "compile": [
        *(quantised("bf16", m, 8192, 8192, f, g) for f, g in FORMS for m in (1, 16)),
        *(quantised("bf16", 64, 8192, 8192, f, g) for f, g in FORMS[1:]),
        *(quantised("fp16", 16, 8192, 8192, f, g) for f, g in FORMS[1:]),
        *(quantised("bf16", 16, 4096, 4096, "int4", g, zero=True) for g in GROUPS),
        quantised("bf16", 5, 4096, 4096, "int8", 64),
        quantised("fp32", 16, 8192, 8192, "int4", 128),
        workload("bf16", M=3, N=500, K=1000, format="fp8"),
    ],
    "tune": [
        *(quantised("bf16", m, n, n, f, g) for f, g in FORMS for m in (1, 8, 16, 64) for n in (4096, 8192)),
        *(quantised("bf16", 1, n, k, f, g) for f, g in FORMS for n, k in LAYERS),
        *(quantised("bf16", m, 8192, 8192, "int4", g) for m in (1, 16) for g in (32, 64)),
    ],
    "model": [quantised("bf16", m, n, k, f, g) for f, g in FORMS for m in (1, 16) for n, k in LAYERS],
}

MUTANTS = [
    *mutants.usual(reference),
    Mutant("last block left out", _last_block_left_out),
    Mutant("halves of a word swapped", _halves_swapped),
    Mutant("the next group's scale", _next_groups_scale),
    Mutant("zero points left out", _zero_points_left_out),
]
