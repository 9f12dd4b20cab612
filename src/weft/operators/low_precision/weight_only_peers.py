"""What others make of a weight-only product, with the weight in their own form, made beforehand and not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.definition import Declined
from weft.operators.low_precision.quantized_weight import MIDDLE, QuantizedWeight, dequantize_weight, unpack_weight

_made: Any = WeakIdKeyDictionary()


def _beforehand(weight: QuantizedWeight, what: str, make: Callable[[], Any]) -> Any:
    """``make()``, kept as long as the weight lives and is not written to."""
    versions = [t._version for t in weight[:3] if t is not None]
    known = _made.setdefault(weight.words, {})
    if what not in known or known[what][0] != versions:
        known[what] = versions, make()
    return known[what][1]


def dense(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """PyTorch's linear layer on the dequantised weight: what the same model takes without quantisation."""
    return F.linear(x, _beforehand(weight, f"dense {x.dtype}", lambda: dequantize_weight(weight, x.dtype)), bias)


def tinygemm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """``torch._weight_int4pack_mm``, which PyTorch has for bf16 with groups; its value is (code - 8) · scale + offset."""
    if weight.format != "int4":
        raise Declined("tinygemm takes int4")

    def make() -> tuple[Tensor, Tensor]:
        codes, scale = unpack_weight(weight), weight.scale.to(x.dtype)
        offset = torch.zeros_like(scale) if weight.zero is None else (MIDDLE - weight.zero.to(x.dtype)) * scale
        packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        return packed, torch.stack((scale.t(), offset.t()), 2).contiguous()

    packed, scales = _beforehand(weight, "tinygemm", make)
    y = torch._weight_int4pack_mm(x, packed, weight.group, scales)
    return y if bias is None else y + bias


def int8pack(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """``torch._weight_int8pack_mm``: int8 with a scale for each row."""
    if weight.format != "int8" or weight.group:
        raise Declined("_weight_int8pack_mm takes int8 with a scale for each row")
    codes = _beforehand(weight, "int8pack", lambda: (unpack_weight(weight), weight.scale.to(x.dtype)))
    y = torch._weight_int8pack_mm(x, *codes)
    return y if bias is None else y + bias
