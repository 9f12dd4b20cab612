"""Linear layers whose weights are codes of 8 or 4 bits, and how codes are made of a weight.

Decoding reads every weight once for each step, so bytes are its time: int8 and fp8 halve them, int4 quarters them. Products are
``weft.ops.weight_only_matmul``'s; its formats and layout are described in ``weft.operators.low_precision.quantized_weight``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import ops
from weft.inference.weights import Linear, Norm
from weft.operators.low_precision.quantized_weight import (
    GROUPS,
    LARGEST_FP8,
    MIDDLE,
    QuantizedWeight,
    dequantize_weight,
    pack_int4,
    prepare_weight,
)  # fmt: skip

# N outputs, K inputs, G groups of a row
FORMATS = ("int4", "int8", "fp8")
FUSED = 4  # tokens of which norm, gate and residual are parts of a product's launch
STEP = 2**24  # weights that are quantised at a time
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of int4's scales that are tried


class Codes(NamedTuple):
    """A weight [N, K] as ``prepare_weight`` takes it: int8 or float8_e4m3fn [N, K], or uint8 [N, K / 2] of int4; scales [N] or
    [N, G]; zero points uint8 [N, G] of int4, or None for 8."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised.

    Args:
        format: ``int4``, ``int8`` or ``fp8`` (e4m3).
        group: columns that share a scale: 32, 64 or 128; 0 for a whole row (not int4). None takes rows, and for int4 the
            longest group that divides K.
        asymmetric: int4 with a zero point for each group.

    Raises:
        ValueError: another format or group, zero points of another format than int4.
    """

    format: str
    group: int | None = None
    asymmetric: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"weights of format {self.format!r:.40}; expected one of {', '.join(FORMATS)}")
        allowed = GROUPS if self.format == "int4" else (0, *GROUPS)
        if self.group is not None and self.group not in allowed:
            raise ValueError(
                f"{self.format} weights in groups of {self.group!r}; expected {', '.join(map(str, allowed))}"
            )
        if self.asymmetric and self.format != "int4":
            raise ValueError(f"{self.format} weights are symmetric; only int4 has zero points")

    @classmethod
    def of(cls, text: str) -> "Scheme":
        """From ``FORMAT[:GROUP][:asymmetric]``, such as ``int4:64:asymmetric``."""
        format, *more = text.split(":")
        group = int(more.pop(0)) if more and more[0].isdigit() else None
        if more not in ([], ["asymmetric"]):
            raise ValueError(f"weights {text!r:.60}; expected FORMAT[:GROUP][:asymmetric], such as int4:64:asymmetric")
        return cls(format, group, bool(more))

    def __str__(self) -> str:
        return ":".join((self.format, *([str(self.group)] if self.group else []), *["asymmetric"] * self.asymmetric))

    def group_of(self, columns: int) -> int:
        """Raises ValueError where groups do not divide the columns."""
        if self.group is None:
            if self.format != "int4":
                return 0
            found = next((group for group in reversed(GROUPS) if columns % group == 0), None)
            if found is None:
                raise ValueError(f"a weight of {columns} columns; int4 needs a multiple of {GROUPS[0]}")
            return found
        if self.group and columns % self.group:
            raise ValueError(
                f"a weight of {columns} columns in groups of {self.group}; expected a group that divides them"
            )
        return self.group


class Quantized(Linear):
    """Codes. On a CPU they gain nothing and are dequantised once."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype):
        self.weight, self.bias = weight, bias
        self.dense = None if weight.words.is_cuda else dequantize_weight(weight, dtype)

    @classmethod
    def of(cls, codes: Codes, bias: Tensor | None, dtype: torch.dtype) -> "Quantized":
        return cls(prepare_weight(*codes), bias, dtype)

    @property
    def bytes(self) -> int:
        return (self.weight if self.dense is None else self.dense).nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.dense is not None:
            return F.linear(x, self.dense, self.bias)
        y: Tensor = ops.weight_only_matmul(x, self.weight, self.bias)
        return y

    def fused(
        self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor | None:
        """Of few tokens on a GPU, else None."""
        if self.dense is not None or x.shape[0] > FUSED:
            return None
        weight, eps = norm or (None, 0.0)
        activation = "swiglu" if gated else None
        y: Tensor = ops.weight_only_matmul(x, self.weight, self.bias, weight, eps, residual, activation)
        return y


class Quantise:
    """Makes a :class:`Quantized` layer of a weight [N, K]: what ``LLM(quantize=...)`` uses."""

    def __init__(self, scheme: Scheme):
        self.scheme = scheme

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Quantized:
        return Quantized.of(quantised(weight, self.scheme), bias, weight.dtype)

    def head(self, weight: Tensor, bias: Tensor | None) -> Quantized:
        """Logits are of int8 rows, whatever the layers' format."""
        return Quantized.of(quantised(weight, Scheme("int8")), bias, weight.dtype)


@torch.no_grad()
def quantised(weight: Tensor, scheme: Scheme) -> Codes:
    """A finite weight [N, K] rounded to codes. int8 and fp8 take the scale that a row's or group's largest magnitude fills,
    int4 the one of several with the smallest sum of squared errors. Scales have the weight's dtype (float32 for whole rows)."""
    group = scheme.group_of(weight.shape[1])
    rows = max(1, STEP // max(weight.shape[1], 1))
    parts = [_quantised(part, scheme, group) for part in weight.split(rows)]
    codes, scales, zeros = zip(*parts, strict=True)
    return Codes(torch.cat(codes), torch.cat(scales), None if zeros[0] is None else torch.cat(zeros))


def _quantised(weight: Tensor, scheme: Scheme, group: int) -> Codes:
    n, k = weight.shape
    parts = weight.float().view(n, -1, group or k)  # [N, G, columns]
    dtype = weight.dtype if group else torch.float32
    if scheme.format == "int4":
        u, scale, zero = _int4(parts, dtype, scheme.asymmetric)
        return Codes(pack_int4(u.view(n, k).to(torch.uint8)), scale, zero)
    scale = _finite(parts.abs().amax(2) / (127 if scheme.format == "int8" else LARGEST_FP8), dtype)
    q = parts / scale.float()[..., None]
    q = q.round().clamp(-127, 127).to(torch.int8) if scheme.format == "int8" else q.clamp(-LARGEST_FP8, LARGEST_FP8)
    codes = q.view(n, k) if scheme.format == "int8" else q.view(n, k).to(torch.float8_e4m3fn)
    return Codes(codes, scale if group else scale[:, 0])


def _int4(parts: Tensor, dtype: torch.dtype, asymmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes 0 … 15 [N, G, columns], scales and zero points [N, G], of the candidate with the least squared error in each group.

    Symmetric codes are -8 … 7, so the scale may also be the one, of either sign, that maps the largest magnitude to -8.
    """
    best: Tensor | None = None
    low, high = parts.amin(2).clamp(max=0.0), parts.amax(2).clamp(min=0.0)
    extreme = torch.where(-low > high, low, high)
    for shrink in SHRINK:
        for span in [(high - low) / 15] if asymmetric else [extreme.abs() / 7, extreme / -8]:
            scale = _finite(span * shrink, dtype)
            wide = scale.float()[..., None]
            zero = (-low * shrink / wide[..., 0]).round().clamp(0, 15) if asymmetric else torch.full_like(low, MIDDLE)
            u = ((parts / wide).round() + zero[..., None]).clamp(0, 15)
            error = ((u - zero[..., None]) * wide - parts).square().sum(2)
            if best is None:
                best, codes, scales, zeros = error, u, scale, zero
                continue
            better = error < best
            best = torch.where(better, error, best)
            codes = torch.where(better[..., None], u, codes)
            scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    return codes, scales, zeros.to(torch.uint8) if asymmetric else None


def _finite(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``, away from zero where there is nothing to scale or it would underflow."""
    limits = torch.finfo(dtype)
    size = scale.abs().clamp(limits.tiny, limits.max)
    return torch.where(scale < 0, -size, size).to(dtype)
