"""From fp32 to codes of 8 bits and back, in Triton and in PyTorch, equal bit for bit.

Rounding to an fp8 is integer arithmetic on an fp32's bits: adding half of what is cut off (and one at ties whose kept part is
odd) carries into the kept bits, and into the exponent where it must. Below the format's smallest normal number its steps are
equal, and one addition of fp32 rounds to them: of the power of two whose own last place is such a step. From sm_89 on, one
instruction rounds two elements; it gives the same codes. Stochastic rounding adds 16 random bits to what is cut off, at its
upper end, and half of their last place: the expectation is the number itself to 2**-17 of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.dropout.philox import GROUP, WORD, words
from weft.operators.quantization.formats import FORMATS, Format

# ---- Triton ----------------------------------------------------------------------------------------------------------


@triton.jit
def integer_code(y, bits, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """round(y) within ± LARGEST as int32; 0 for NaN. The bounds stand between product and sum, which thus cannot become one
    multiply-add with another rounding."""
    bounded = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    if STOCHASTIC:
        q = tl.floor(bounded + uniform(bits)).to(tl.int32)
    else:
        q = (bounded + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2**23: its last place is 1
    return tl.where(y == y, q, 0)


@triton.jit
def uniform(bits):
    """The upper 16 bits as a number in (0, 1), exact in fp32."""
    return (bits >> 16).to(tl.int32).to(tl.float32) * 0.0000152587890625 + 0.00000762939453125  # 2**-16, 2**-17


@triton.jit
def float_code(y, bits, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The fp8 nearest to y within ± LARGEST, as int32; NaN is 0x7f."""
    word = y.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    not_a_number = magnitude > 0x7F800000
    CUT: tl.constexpr = 23 - MANTISSA
    bounded = tl.minimum(tl.where(not_a_number, 0.0, tl.abs(y)), LARGEST)
    a = bounded.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        added = (2 * (bits >> 16).to(tl.int32) + 1) << (CUT - 17)
        small = (bounded * (1 << (BIAS - 1 + MANTISSA)) + uniform(bits)).to(tl.int32)
    else:
        added = (1 << (CUT - 1)) - 1 + ((a >> CUT) & 1)
        ONE: tl.constexpr = 1 << (24 - BIAS - MANTISSA)  # its last place is the format's smallest step
        small = (bounded + ONE).to(tl.int32, bitcast=True) - ((151 - BIAS - MANTISSA) << 23)
    code = ((a + added) >> CUT) - ((127 - BIAS) << MANTISSA)
    code = tl.where(a < ((128 - BIAS) << 23), small, code)
    return tl.where(not_a_number, 0x7F, code | ((word >> 24) & 0x80))


@triton.jit
def encode(y, bits, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, HARDWARE: tl.constexpr):
    """y [R, C] as bytes: uint8 [R, C], of int4 [R, C / 2] with the even column in the lower half."""
    if FORMAT == "int8":
        return (integer_code(y, bits, 127.0, STOCHASTIC) & 255).to(tl.uint8)
    elif FORMAT == "int4":
        q = integer_code(y, bits, 7.0, STOCHASTIC)
        even, odd = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
        return ((even & 15) | ((odd & 15) << 4)).to(tl.uint8)
    elif FORMAT == "fp8_e4m3":
        if HARDWARE and not STOCHASTIC:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return float_code(y, bits, 448.0, 3, 7, STOCHASTIC).to(tl.uint8)
    else:
        if HARDWARE and not STOCHASTIC:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return float_code(y, bits, 57344.0, 2, 15, STOCHASTIC).to(tl.uint8)


@triton.jit
def decode(code, FORMAT: tl.constexpr):
    """Bytes [R, C] as exact fp32: [R, C], of int4 [R, 2 C]."""
    if FORMAT == "int8":
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT == "int4":
        word = code.to(tl.int32)
        both = tl.join((word << 28) >> 28, (word << 24) >> 28)
        return tl.reshape(both, [code.shape[0], code.shape[1] * 2]).to(tl.float32)
    elif FORMAT == "fp8_e4m3":
        word = code.to(tl.int32)
        moved = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True)
        exact = moved * 1.329227995784916e36  # 2**120: fp32's exponents begin 120 lower
        return tl.where((word & 0x7F) == 0x7F, float("nan"), exact)
    else:  # the upper half of an fp16
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def random_sixteen(shape: tuple[int, ...], seed: int | Tensor, offset: int, device: torch.device) -> Tensor:
    """16 random bits (int64) for each element: column n of row m has half n % 2 (the lower first) of word n % 8 // 2 of the
    Philox group m * ceil(N / 8) + n // 8; all leading dimensions count as rows."""
    n = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    per_row = -(-n // GROUP)
    group = torch.arange(rows * per_row, device=device)
    seed = seed.view(()) if isinstance(seed, Tensor) else seed
    found = words((group & WORD, group >> 32, offset & WORD, (offset >> 32) & WORD), (seed & WORD, (seed >> 32) & WORD))
    halves = torch.stack([half for word in found for half in (word & 0xFFFF, word >> 16)], -1)
    return halves.view(rows, per_row * GROUP)[:, :n].reshape(shape)


def rounded(y: Tensor, format: str, sixteen: Tensor | None = None, finite: bool = False) -> Tensor:
    """y (fp32) as values of the format, int4 not packed; to nearest even, or stochastically by 16 random bits an element.
    ``finite``: there is no NaN."""
    made = FORMATS[format]
    bounded = y.clamp(-made.largest, made.largest)
    if made.mantissa:
        return bounded.to(made.dtype) if sixteen is None else _stochastic_float(bounded, made, sixteen)
    bounded = bounded if finite else torch.where(y.isnan(), 0.0, bounded)
    whole = bounded.round() if sixteen is None else (bounded + _uniform(sixteen)).floor()
    return whole.to(torch.int8)


def _uniform(sixteen: Tensor) -> Tensor:
    return sixteen.float() * 2.0**-16 + 2.0**-17


def _stochastic_float(y: Tensor, made: Format, sixteen: Tensor) -> Tensor:
    word = y.view(torch.int32)
    magnitude = word & 0x7FFFFFFF
    cut = 23 - made.mantissa
    code = ((magnitude + ((2 * sixteen.int() + 1) << (cut - 17))) >> cut) - ((127 - made.bias) << made.mantissa)
    small = (torch.where(y.isnan(), 0.0, y.abs()) * 2.0 ** (made.bias - 1 + made.mantissa) + _uniform(sixteen)).int()
    code = torch.where(magnitude < (128 - made.bias) << 23, small, code) | ((word >> 24) & 0x80)
    return torch.where(y.isnan(), 0x7F, code).to(torch.uint8).view(made.dtype)


def packed(q: Tensor) -> Tensor:
    """int8 [..., N] of 4 bits each → uint8 [..., ceil(N / 2)], the even column in the lower half."""
    q = torch.nn.functional.pad(q, (0, q.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return ((q[..., 0] & 15) | (q[..., 1] << 4)).view(torch.uint8)


def unpacked(values: Tensor, columns: int) -> Tensor:
    """The inverse: int8 [..., columns]."""
    q = values.view(torch.int8)
    return torch.stack((q << 4 >> 4, q >> 4), -1).flatten(-2)[..., :columns]
