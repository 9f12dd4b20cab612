"""The implementations of ``quantize``: its formula in PyTorch, our launches, and peers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.call import traced
from weft.operators.dropout.seeds import draw
from weft.operators.quantization.formats import (
    FORMATS,
    Scheme,
    absmax,
    inverse_of,
    scale_of,
    scale_shape,
    spread,
    values_shape,
)
from weft.operators.quantization.plans import plans, scaled_plans
from weft.operators.quantization.rounding import packed, random_sixteen, rounded

Quantized = tuple[Tensor, Tensor]  # values, scale


def reference(
    x: Tensor,
    format: str,
    granularity: str = "row",
    *,
    group_size: int = 128,
    scale: float | Tensor | None = None,
    power_of_two: bool = False,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    offset: int = 0,
    check_scale: bool = False,
    finite: bool = False,
) -> Quantized:
    """Always in fp32: that is the arithmetic which kernels have to repeat to the bit. ``finite`` says that x is."""
    x, scheme = x.detach(), Scheme(format, granularity, group_size, power_of_two)
    if scale is None:
        made = scale_of(absmax(x, granularity, group_size, finite), scheme)
    else:
        made = given(scale, x).to(torch.float32)
    y = x.float() * spread(inverse_of(made), tuple(x.shape), granularity, group_size)
    sixteen = None
    if rounding == "stochastic":
        seed, offset = drawn(x) if seed is None else (seed, offset)
        sixteen = random_sixteen(tuple(x.shape), seed, offset, x.device)
    q = rounded(y, format, sixteen, finite)
    return packed(q) if format == "int4" else q, made


def drawn(x: Tensor) -> tuple[int | Tensor, int]:
    """A seed and an offset that no other call has; while a compiler traces, a tensor that it draws itself."""
    if traced(x):
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=x.device), 0
    return draw(x.device)


def given(scale: float | Tensor, x: Tensor) -> Tensor:
    """A scale that came as an argument, as kernels read it; a strided one is copied."""
    if isinstance(scale, Tensor):
        return scale.detach().contiguous()
    return torch.full((), scale, dtype=torch.float32, device=x.device)


# ---- launches --------------------------------------------------------------------------------------------------------


def launch(
    x: Tensor, scheme: Scheme, scale: Tensor | None, rounding: str, seed: int | Tensor | None, offset: int
) -> Quantized:
    values = torch.empty(values_shape(tuple(x.shape), scheme.format), dtype=torch.uint8, device=x.device)
    made = empty_scale(x, scheme) if scale is None else scale
    if not values.numel():
        return values.view(scheme.of.dtype), scale_of(torch.zeros_like(made), scheme) if scale is None else made
    seeds, number, where = x, 0, "none"
    if rounding == "stochastic":
        seed, offset = draw(x.device) if seed is None else (seed, offset)
        where = "memory" if isinstance(seed, Tensor) else "number"
        seeds, number = (seed, 0) if isinstance(seed, Tensor) else (x, seed % 2**64)
    x = x.detach()
    ready = plans.of((x,), scheme, where) if scale is None else scaled_plans.of((x, made), scheme, where)
    ready(x, values, made, seeds, number, offset)
    return values.view(scheme.of.dtype), made


def empty_scale(x: Tensor, scheme: Scheme) -> Tensor:
    shape = scale_shape(tuple(x.shape), scheme.granularity, scheme.group_size)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def quantize_triton(
    x: Tensor,
    format: str,
    granularity: str = "row",
    *,
    group_size: int = 128,
    scale: float | Tensor | None = None,
    power_of_two: bool = False,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    offset: int = 0,
    check_scale: bool = False,
) -> Quantized:
    scheme = Scheme(format, granularity, group_size, power_of_two)
    return launch(x, scheme, None if scale is None else given(scale, x), rounding, seed, offset)


# ---- peers -----------------------------------------------------------------------------------------------------------


def plain(**named: Any) -> Quantized:
    """What a user writes, without a thought of NaN and infinities."""
    return reference(**named, finite=True)


def torchao(x: Tensor, format: str, granularity: str = "row", **options: Any) -> Quantized:
    """Its eager functions, which a user compiles as part of a model; and its Triton kernel for fp8 groups."""
    if (
        options.get("scale") is not None
        or options.get("power_of_two")
        or options.get("rounding", "nearest") != "nearest"
    ):
        raise Declined("torchao's scales here are those of absmax, rounded to nearest")
    if x.ndim != 2 or format == "int4":
        raise Declined("torchao packs int4 for its own kernels only; other formats are taken of a matrix here")
    size = options.get("group_size", 128)
    block = {
        "tensor": x.shape,
        "row": (1, x.shape[1]),
        "column": (x.shape[0], 1),
        "group": (1, size),
        "block": (128, 128),
    }[granularity]
    if any(n % b for n, b in zip(x.shape, block, strict=True)):
        raise Declined(f"torchao's groups divide the tensor; {tuple(x.shape)} is no multiple of {tuple(block)}")
    of_scale = scale_shape(tuple(x.shape), granularity, size)
    if format == "int8":
        from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

        scale, zero = choose_qparams_affine(x, MappingType.SYMMETRIC, block, torch.int8, -127, 127, keepdim=True)
        return quantize_affine(x, block, scale, zero, torch.int8, -127, 127), scale.view(of_scale)
    dtype = FORMATS[format].dtype
    if granularity == "group":
        from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant

        return fp8_blockwise_act_quant(x, size, dtype)
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    scale = _choose_scale_float8(x, list(block), dtype)
    return _quantize_affine_float8(x, scale, dtype), scale.view(of_scale)
