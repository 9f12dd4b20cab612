"""What quantize and dequantize ask of their arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.operators.call import FLOATS, check_device, check_tensor, check_values
from weft.operators.quantization.formats import FORMATS, GRANULARITIES, scale_shape

POSITIVE = "a positive, finite fp32 number of at least 2**-126"


def check_granularity(operator: str, granularity: Any, group_size: Any, x: Tensor, name: str) -> None:
    if granularity not in GRANULARITIES or not isinstance(granularity, str):
        raise ValueError(
            f"{operator}: argument 'granularity' is {granularity!r:.40}; expected {_either(GRANULARITIES)}"
        )
    if isinstance(group_size, bool) or not isinstance(group_size, int) or not 1 <= group_size < 2**31:
        raise ValueError(f"{operator}: argument 'group_size' is {group_size!r:.40}; expected an int of at least 1")
    least = 2 if granularity == "block" else 1
    if x.ndim < least:
        shape = "a scalar" if not x.ndim else f"of shape {tuple(x.shape)}"
        dimensions = "one dimension" if least == 1 else "two dimensions for granularity 'block'"
        raise ValueError(f"{operator}: argument '{name}' is {shape}; expected at least {dimensions}")


def check_even(operator: str, format: str, granularity: str, group_size: int) -> None:
    if FORMATS[format].per_byte > 1 and granularity == "group" and group_size % 2:
        raise ValueError(
            f"{operator}: argument 'group_size' is {group_size}; expected an even number for int4, which has two to a byte"
        )


def check_format(operator: str, format: Any) -> None:
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"{operator}: argument 'format' is {format!r:.40}; expected {_either(FORMATS)}")


def check_scale(
    operator: str,
    scale: Any,
    x: Tensor,
    name: str,
    shape: tuple[int, ...],
    granularity: str,
    group_size: int,
    values: bool,
) -> None:
    """``shape`` is that of the elements; ``values`` says to look at what a tensor holds, which waits for the device."""
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        if granularity != "tensor":
            raise TypeError(
                f"{operator}: argument 'scale' is a number; expected a tensor of shape "
                f"{scale_shape(shape, granularity, group_size)} for granularity '{granularity}'"
            )
        if not (math.isfinite(scale) and 2.0**-126 <= scale <= torch.finfo(torch.float32).max):
            raise ValueError(f"{operator}: argument 'scale' is {scale}; expected {POSITIVE}")
        return
    check_tensor(operator, "scale", scale, (torch.float32,))
    check_device(operator, "scale", scale, name, x)
    wanted = scale_shape(shape, granularity, group_size)
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"{operator}: argument 'scale' has shape {tuple(scale.shape)}; expected {wanted} for '{name}' of shape "
            f"{tuple(x.shape)} and granularity '{granularity}'"
        )
    if torch.is_grad_enabled() and scale.requires_grad:
        raise ValueError(
            f"{operator}: argument 'scale' wants a gradient, which there is none of; expected scale.detach()"
        )
    if values:
        check_values(
            operator,
            "scale",
            scale,
            lambda t: ~(t.isfinite() & (t >= 2.0**-126)),
            flag="check_scale",
            expected=POSITIVE,
        )


def check_x(operator: str, x: Any) -> None:
    check_tensor(operator, "x", x, FLOATS)


def _either(names: Any) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}"
