"""The definition of products of two quantised matrices: reference, inputs, cost, workloads, mutants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Workload, torch_dtype, workload
from weft.operators import mutants
from weft.operators.low_precision.scaled_kernels import BLOCK
from weft.operators.quantization.formats import FORMATS
from weft.operators.quantization.quantize import reference as quantized
from weft.operators.random_inputs import random_tensor

SCALES = ("tensor", "row", "block")
OPTIONS = {
    "format": ("fp8_e4m3", "fp8_e5m2", "int8"),
    "b_format": ("fp8_e4m3", "fp8_e5m2", "int8"),
    "scales": SCALES,
    "layout": ("NT", "NN"),
    "bias": (True, False),
    "fast": (True, False),
}


def kind_of(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> str:
    """By which scales' shapes fit: "tensor" [] and [], "row" [M, 1] and [1, N], "block" [M, K / 128] and [K / 128, N / 128]."""
    (m, k), n = a.shape, b.shape[1]
    blocks = -(-k // BLOCK)
    if a_scale.numel() == b_scale.numel() == 1 and max(a_scale.ndim, b_scale.ndim) <= 2:
        return "tensor"
    if tuple(a_scale.shape) == (m, 1) and tuple(b_scale.shape) == (1, n):
        return "row"
    if tuple(a_scale.shape) == (m, blocks) and tuple(b_scale.shape) == (blocks, -(-n // BLOCK)):
        return "block"
    raise ValueError(
        f"scaled_matmul: 'a_scale' has shape {tuple(a_scale.shape)} and 'b_scale' {tuple(b_scale.shape)}; expected [] and [] "
        f"(of a tensor), {(m, 1)} and {(1, n)} (of rows and columns), or {(m, blocks)} and {(blocks, -(-n // BLOCK))} "
        f"(of blocks of {BLOCK})"
    )


def reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Tensor:
    """Dequantised operands multiplied in fp32 (in float64 if the scales are, or for int8: its sums are exact) and rounded
    once."""
    wide = torch.float64 if a.dtype == torch.int8 else a_scale.dtype
    out = dequantised(a, b, a_scale.to(wide), b_scale.to(wide), bias, dtype=dtype)
    return out if a_scale.dtype == torch.float64 else out.to(dtype)


def dequantised(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulate: bool = False,
) -> Tensor:
    """What a user of PyTorch writes: all in the scales' dtype."""
    wide = a_scale.dtype
    by_a, by_b = a_scale, b_scale
    if a_scale.ndim == 2 and a_scale.shape[1] > 1:
        by_a = a_scale.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
    if (
        b_scale.ndim == 2
        and b_scale.shape[0] == -(-b.shape[0] // BLOCK)
        and b_scale.shape[1] == -(-b.shape[1] // BLOCK)
    ):
        by_b = b_scale.repeat_interleave(BLOCK, 0)[: b.shape[0]].repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    out = (a.to(wide) * by_a) @ (b.to(wide) * by_b)
    if bias is not None:
        out = out + bias.to(wide)
    return out if wide == torch.float64 else out.to(dtype)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Random matrices, quantised; b lies as its transpose does (a linear layer's weight), unless ``layout=NN``."""
    format, scales = w.option("format", "fp8_e4m3"), w.option("scales", "tensor")
    b_format = w.option("b_format", format)

    def operand(rows: int, granularity: str, format: str) -> tuple[Tensor, Tensor]:
        x = random_tensor(g, (rows, w["K"]), "fp32", device)
        if device == "meta":
            shapes = {
                "tensor": (),
                "row": (rows, 1),
                "group": (rows, -(-w["K"] // BLOCK)),
                "block": (-(-rows // BLOCK), -(-w["K"] // BLOCK)),
            }
            return x.to(FORMATS[format].dtype), torch.empty(shapes[granularity], device=device)
        return quantized(x, format, granularity)

    a, a_scale = operand(w["M"], "group" if scales == "block" else scales, format)
    b, b_scale = operand(w["N"], scales, b_format)
    if w.option("layout", "NT") == "NN":
        b = b.t().contiguous().t()
    bias = random_tensor(g, (w["N"],), w.dtype, device) if w.option("bias", False) else None
    return {
        "a": a,
        "b": b.t(),
        "a_scale": a_scale,
        "b_scale": b_scale.t() if b_scale.ndim else b_scale,
        "bias": bias,
        "dtype": torch_dtype(w.dtype),
        "fast_accumulate": w.option("fast", False),
    }


def cost(w: Workload, direction: str) -> Cost:
    m, n, k = w["M"], w["N"], w["K"]
    unit = "int8" if w.option("format", "fp8_e4m3") == "int8" else "fp8"
    return Cost((m + n) * k, m * n * w.bytes_per_element, {unit: 2.0 * m * n * k})


def terms(w: Workload) -> int:
    """Tensor cores add fp8 products to 14 bits (README), whatever the result's dtype: n of them err as 4⁹ n would in fp32."""
    return w["K"] if w.option("format", "fp8_e4m3") == "int8" else 4**9 * w["K"]


def _scales_swapped(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *more: Any, **named: Any) -> Tensor:
    return reference(a, b, a_scale.flatten().roll(1).view(a_scale.shape) * 1.05, b_scale, *more, **named)


def _last_block_left_out(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *more: Any, **named: Any) -> Tensor:
    keep = torch.arange(a.shape[1], device=a.device) < max(a.shape[1] - 8, 0)
    wide = torch.where(keep, a.float(), 0.0).to(a.dtype)
    return reference(wide, b, a_scale, b_scale, *more, **named)


def _no_bias(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, **named: Any
) -> Tensor:
    return reference(a, b, a_scale, b_scale, None, **named)


SQUARES = tuple(
    workload("bf16", M=n, N=n, K=n, format=f, scales=s)
    for n in (4096, 8192)
    for f, s in (("fp8_e4m3", "tensor"), ("fp8_e4m3", "row"), ("fp8_e4m3", "block"), ("int8", "row"))
)

WORKLOADS = {
    "verify": [
        *(workload(M=m, N=n, K=k) for m, n, k in ((1, 1, 1), (33, 65, 17), (64, 48, 256))),
        *(workload(M=40, N=48, K=160, format=f, scales=s) for f in ("fp8_e4m3", "int8") for s in SCALES),
        workload(M=40, N=48, K=160, fast=True),
        workload(M=33, N=140, K=300, scales="block", bias=True),
        workload(M=40, N=48, K=96, format="fp8_e5m2", b_format="fp8_e4m3", layout="NN", bias=True),
        *(workload(M=m, N=n, K=k) for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0))),
    ],
    "full": [workload(M=257, N=129, K=1000, format=f, scales=s) for f in ("fp8_e4m3", "int8") for s in SCALES],
    "huge": [workload("bf16", M=2**16 + 8, N=2**15 + 16, K=64)],
    "bench": list(SQUARES),
    "quick": [SQUARES[0]],
    "compile": [
        *(w for w in SQUARES if w["M"] == 4096),
        workload(M=512, N=512, K=500, format="fp8_e5m2", bias=True),
    ],
    "tune": [*SQUARES],
    "model": [
        workload("bf16", M=4096, N=n, K=k, scales="row") for n, k in ((6144, 4096), (28672, 4096), (4096, 14336))
    ],
}

MUTANTS = [
    *mutants.usual(reference),
    Mutant("a neighbour's scale", _scales_swapped),
    Mutant("last terms left out", _last_block_left_out),
    Mutant("bias left out", _no_bias),
]
