"""Weights of codes for products on the emulator: of a case's format, group, sizes and dtypes."""

from typing import Any

import torch

from weft.operators.low_precision.quantized_weight import QuantizedWeight, prepare_weight, quantize_weight


def weight_of(case: Any, random: torch.Generator) -> QuantizedWeight:
    """[n, k]: of normally distributed numbers, or with ``case.codes`` "all" of every code."""
    n, k = case.n, case.k
    if case.codes == "all":
        codes = (torch.arange(n * k) * 7 % 256).to(torch.uint8).view(n, -1)
        scale = (torch.arange(n) % 5 + 1).to(case.scale) / 4
        if case.format == "int4":
            return prepare_weight(
                codes[:, : k // 2].contiguous(), scale[:, None].expand(-1, k // case.group).contiguous()
            )
        if case.format == "fp8":
            return prepare_weight(codes.where(codes & 127 != 127, codes - 1).view(torch.float8_e4m3fn), scale)
        return prepare_weight(codes.view(torch.int8), scale)
    w = torch.randn(n, k, generator=random) + (0.5 if case.zero else 0)
    made = quantize_weight(w, case.format, case.group, zero_points=case.zero)
    return made._replace(scale=made.scale.to(case.scale))
