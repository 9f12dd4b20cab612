"""What tensors are quantised to, which elements share a scale, and the formulas of scales and values in PyTorch.

``M`` rows and ``N`` columns are the last two dimensions; leading ones count as further rows, or for blocks as a batch.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import UnknownName
from weft.operators.dropout.philox import GROUP, halves


class Format(NamedTuple):
    """``largest`` is what absmax is mapped to; floats have a sign, ``mantissa`` bits and an exponent with this ``bias``."""

    dtype: torch.dtype
    largest: float
    per_byte: int = 1
    mantissa: int = 0
    bias: int = 0


FORMATS = {
    "int8": Format(torch.int8, 127.0),
    "int4": Format(torch.uint8, 7.0, per_byte=2),
    "fp8_e4m3": Format(torch.float8_e4m3fn, 448.0, mantissa=3, bias=7),
    "fp8_e5m2": Format(torch.float8_e5m2, 57344.0, mantissa=2, bias=15),
}
GRANULARITIES = ("tensor", "row", "column", "group", "block")
BLOCK = 128  # rows and columns of a block
SMALLEST_SCALE = 2.0**-126  # the smallest normal number: 1 / scale is finite
LARGEST_FLOAT = torch.finfo(torch.float32).max


class Scheme(NamedTuple):
    """How a tensor is quantised; all that plans and formulas need to know besides the tensor."""

    format: str
    granularity: str
    group_size: int = BLOCK
    power_of_two: bool = False

    @property
    def of(self) -> Format:
        return FORMATS[self.format]


def format_of(dtype: torch.dtype) -> str:
    """The format whose values have this dtype."""
    for name, made in FORMATS.items():
        if made.dtype == dtype:
            return name
    raise UnknownName("dtype of quantised values", str(dtype), [str(made.dtype) for made in FORMATS.values()])


def values_shape(shape: tuple[int, ...], format: str) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // FORMATS[format].per_byte))


def scale_shape(shape: tuple[int, ...], granularity: str, group_size: int) -> tuple[int, ...]:
    """Of the scales of a tensor of this shape: that of x with the spanned dimensions 1, or one for each group or block."""
    n = shape[-1]
    if granularity == "tensor":
        return ()
    if granularity == "row":
        return (*shape[:-1], 1)
    if granularity == "column":
        return (*(1,) * (len(shape) - 1), n)
    if granularity == "group":
        return (*shape[:-1], -(-n // group_size))
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-n // BLOCK))


# ---- formulas, in fp32: the kernels compute the same, operation by operation -----------------------------------------


def absmax(x: Tensor, granularity: str, group_size: int, finite: bool = False) -> Tensor:
    """Of the elements that share a scale; NaN does not count, an infinity counts as the largest fp32 number (``finite``: there
    are none)."""
    wanted = scale_shape(tuple(x.shape), granularity, group_size)
    if not x.numel():
        return torch.zeros(wanted, dtype=torch.float32, device=x.device)
    a = x.float().abs()
    if not finite:
        a = torch.where(a.isnan(), 0.0, a).clamp_max(LARGEST_FLOAT)
    n = x.shape[-1]
    if granularity == "tensor":
        return a.amax()
    if granularity == "row":
        return a.amax(-1, keepdim=True)
    if granularity == "column":
        return a.reshape(-1, n).amax(0).view(wanted)
    if granularity == "group":
        return F.pad(a, (0, -n % group_size)).unflatten(-1, (-1, group_size)).amax(-1)
    a = F.pad(a, (0, -n % BLOCK, 0, -x.shape[-2] % BLOCK))
    return a.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).amax((-3, -1))


def scale_of(largest: Tensor, scheme: Scheme) -> Tensor:
    """absmax / the format's largest value; with ``power_of_two`` the next power of two that is not smaller."""
    # Of fp32 numbers, a quotient in fp64 rounded to fp32 is the true one, also where a compiler divides fp32 approximately. A
    # tensor divides: by a number, PyTorch on CUDA multiplies with its rounded reciprocal.
    scale = (largest.double() / torch.full_like(largest, scheme.of.largest, dtype=torch.float64)).float()
    if scheme.power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return scale.clamp_min(SMALLEST_SCALE)


def inverse_of(scale: Tensor) -> Tensor:
    """1 / scale by true division."""
    return scale.double().reciprocal().float()


def spread(scale: Tensor, shape: tuple[int, ...], granularity: str, group_size: int) -> Tensor:
    """Scales repeated for the elements of a tensor of this shape (left to broadcasting where that is enough)."""
    if granularity not in ("group", "block"):
        return scale
    size = group_size if granularity == "group" else BLOCK
    wide = scale.repeat_interleave(size, -1)[..., : shape[-1]]
    return wide if granularity == "group" else wide.repeat_interleave(BLOCK, -2)[..., : shape[-2], :]


def random_sixteen(shape: tuple[int, ...], seed: int | Tensor, offset: int, device: torch.device) -> Tensor:
    """16 random bits (int64) for each element: column n of row m has half n % 2 (the lower first) of word n % 8 // 2 of the
    Philox group m * ceil(N / 8) + n // 8; all leading dimensions count as rows."""
    rows, n, per_row = math.prod(shape[:-1]), shape[-1], -(-shape[-1] // GROUP)
    found = torch.stack(halves(rows * per_row, seed, offset, device), -1)
    return found.view(rows, per_row * GROUP)[:, :n].reshape(shape)


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
    q = F.pad(q, (0, q.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return ((q[..., 0] & 15) | (q[..., 1] << 4)).view(torch.uint8)


def unpacked(values: Tensor, columns: int) -> Tensor:
    """The inverse: int8 [..., columns]."""
    q = values.view(torch.int8)
    return torch.stack((q << 4 >> 4, q >> 4), -1).flatten(-2)[..., :columns]
