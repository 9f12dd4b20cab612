"""Quantised weights of linear layers: their formats, how one is made, and the layout that ``weight_only_matmul`` reads.

A weight [N, K] is codes and scales, one scale for a row or one for each group of columns of a row:

=========  ==============================================  =======================================================
format     codes, as they are usually stored               value
=========  ==============================================  =======================================================
``int8``   int8 [N, K]                                     code · scale
``fp8``    float8_e4m3fn [N, K]                            code · scale
``int4``   uint8 [N, K / 2], low nibble = even column      (nibble - zero) · scale; zero is 8 where there are none
=========  ==============================================  =======================================================

Scales are [N] (``int8``, ``fp8``) or [N, K / group] with a group of 32, 64 or 128 columns, zero points uint8 [N, K / group].

**Prepared layout.** A program multiplies pairs of neighbouring columns in the two halves of a register. So that one shift and
one mask unpack a pair, a row's columns are cut into *slices* of a group (of 128 columns without groups), as many slices as fit
make a *chunk*, and a 32-bit word holds columns 2j and 2j + 1 of every slice of a chunk, the even ones in its lower half::

    int4: four slices a, b, c, d      bits 31 … 0:  d₁ c₁ b₁ a₁ d₀ c₀ b₀ a₀      (a₀ = a[2j], a₁ = a[2j + 1])
    int8, fp8: two slices a, b                          b₁ a₁ b₀ a₀

Slice i of a chunk is then ``word >> (bits · i)`` under a mask. Rows are filled up to whole blocks of 512 columns in 4 bits,
256 in 8 bits. Codes of ``int8`` are stored with 128 added.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from weft.operators.checks import check_device, check_shape, check_tensor

FORMATS = ("int8", "int4", "fp8")
GROUPS = (32, 64, 128)
SLICE = 128  # columns of a slice where scales are of whole rows; slices of groups come in blocks of as many
BITS = {"int8": 8, "int4": 4, "fp8": 8}
CODES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
SCALES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_FP8 = 448.0
MIDDLE = 8  # int4's zero point where none is given


class QuantizedWeight(NamedTuple):
    """A prepared weight [N, K]; make it with :func:`quantize_weight` or :func:`prepare_weight`."""

    words: Tensor  # int32 [N, 64 · blocks], the codes in the prepared layout
    scale: Tensor  # [N], or [N, K / group] stored group by group
    zero: Tensor | None  # uint8 [N, K / group] stored likewise
    format: str  # ``int8``, ``int4`` or ``fp8``
    group: int  # columns that share a scale; 0 where a row does
    columns: int  # K

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.words, self.scale, self.zero) if t is not None)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """Its tensors on a device."""
        zero = None if self.zero is None else self.zero.to(device)
        return self._replace(words=self.words.to(device), scale=self.scale.to(device), zero=zero)


def slices(format: str) -> int:
    """Of a chunk: as many codes as fit into 16 bits."""
    return 16 // BITS[format]


def block(format: str) -> int:
    """Columns that rows are filled up to multiples of."""
    return slices(format) * SLICE


# ---- making one ------------------------------------------------------------------------------------------------------


def quantize_weight(w: Tensor, format: str, group: int | None = None, *, zero_points: bool = False) -> QuantizedWeight:
    """Rounds a weight to the nearest codes, with scales that the largest magnitude of a row or group fills.

    Args:
        w: [N, K]; float32, float16 or bfloat16.
        format: ``int8``, ``int4`` or ``fp8``.
        group: columns that share a scale: 32, 64 or 128; 0 for whole rows (not ``int4``). None takes 128 for ``int4``, else 0.
        zero_points: ``int4`` only: asymmetric, codes 0 … 15 from a group's smallest value to its largest.

    Returns:
        A prepared weight; scales of rows are float32, of groups w's dtype.

    Raises:
        TypeError: not a tensor of those dtypes.
        ValueError: not a matrix, an unknown format or group, K that groups do not divide, weights that are not finite.
    """
    group = (128 if format == "int4" else 0) if group is None else group
    check_tensor("quantize_weight", "w", w, SCALES)
    check_shape("quantize_weight", "w", w, w.ndim == 2, "[N, K]")
    if format not in FORMATS:
        raise ValueError(f"quantize_weight: argument 'format' is {format!r}; expected {', '.join(FORMATS)}")
    groups = GROUPS if format == "int4" else (0, *GROUPS)
    if group not in groups:
        raise ValueError(f"quantize_weight: {format} with a group of {group!r}; expected {', '.join(map(str, groups))}")
    if group and w.shape[1] % group:
        raise ValueError(f"quantize_weight: K is {w.shape[1]} and the group {group}; expected a K that groups divide")
    if zero_points and format != "int4":
        raise ValueError(
            f"quantize_weight: zero_points is True and the format is '{format}'; only int4 has zero points"
        )
    if not bool(w.isfinite().all()):
        raise ValueError("quantize_weight: argument 'w' has NaN or infinities; expected finite weights")
    n, k = w.shape
    w = w.detach()  # a layer's parameter: codes are constants
    parts = w.float().view(n, 1, k) if group == 0 else w.float().reshape(n, k // group, group)
    scale_dtype = torch.float32 if group == 0 else w.dtype
    zero = None
    if zero_points:
        low, high = parts.amin(2).clamp(max=0.0), parts.amax(2).clamp(min=0.0)
        scale = _nonzero((high - low) / 15, scale_dtype)
        zero = (-low / scale.float()).round().clamp(0, 15).to(torch.uint8)
        codes = (parts / scale.float()[..., None]).round() + zero[..., None]
    else:
        largest = parts.abs().amax(2) if k else parts.new_zeros(n, parts.shape[1])
        scale = _nonzero(largest / {"int8": 127.0, "int4": 7.0, "fp8": LARGEST_FP8}[format], scale_dtype)
        codes = parts / scale.float()[..., None]
    codes = codes.reshape(n, k)
    if format == "int4":
        codes = codes.round() if zero_points else codes.round() + MIDDLE
        packed = pack_int4(codes.clamp(0, 15).to(torch.uint8))
    elif format == "int8":
        packed = codes.round().clamp(-127, 127).to(torch.int8)
    else:
        packed = codes.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return prepare_weight(packed, scale[:, 0] if group == 0 else scale, zero)


def _nonzero(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``, away from zero where there is nothing to scale or it would underflow."""
    return scale.clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max).to(dtype)


def pack_int4(codes: Tensor) -> Tensor:
    """uint8 [N, K] of 0 … 15 → uint8 [N, K / 2], the even column in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def prepare_weight(codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> QuantizedWeight:
    """Codes as they are usually stored, brought into the layout that ``weight_only_matmul`` reads. Once, when a model is
    loaded: it looks at all values and waits for the device.

    Args:
        codes: int8 [N, K], float8_e4m3fn [N, K], or uint8 [N, K / 2] with two int4 codes a byte.
        scale: [N] or [N, 1] for whole rows (not int4), [N, K / group] for groups of 32, 64 or 128; a float dtype.
        zero: uint8 [N, K / group], 0 … 15, of int4 only; None is 8.

    Raises:
        TypeError: codes, scales or zero points of another dtype.
        ValueError: shapes that do not fit, K that groups do not divide, scales or codes that are not finite, zero points over
            15.
    """
    format = next((f for f, d in CODES.items() if isinstance(codes, Tensor) and codes.dtype == d), None)
    if format is None:
        got = str(codes.dtype).removeprefix("torch.") if isinstance(codes, Tensor) else f"a {type(codes).__name__}"
        raise TypeError(
            f"prepare_weight: argument 'codes' is {got}; expected int8, float8_e4m3fn, or uint8 of int4 pairs"
        )
    check_shape("prepare_weight", "codes", codes, codes.ndim == 2, "a matrix")
    n, k = codes.shape[0], codes.shape[1] * (2 if format == "int4" else 1)
    check_tensor("prepare_weight", "scale", scale, SCALES)
    group = _group_of(tuple(scale.shape), n, k, format)
    if zero is not None:
        if format != "int4":
            raise ValueError(f"prepare_weight: argument 'zero' came with {format} codes; only int4 has zero points")
        check_tensor("prepare_weight", "zero", zero, (torch.uint8,))
        shape = tuple(scale.shape)
        check_shape("prepare_weight", "zero", zero, tuple(zero.shape) == shape, f"the scale's, {shape}")
    for name, t in (("scale", scale), ("zero", zero)):
        if t is not None:
            check_device("prepare_weight", name, t, "codes", codes)
    if wrong := int((~scale.isfinite()).sum()):
        raise ValueError(f"prepare_weight: argument 'scale' has {wrong} NaN or infinite values")
    if zero is not None and bool((zero > 15).any()):
        raise ValueError(f"prepare_weight: argument 'zero' has {int(zero.max())}; expected 0 … 15")
    raw = codes.view(torch.uint8) if format != "int4" else torch.stack((codes & 15, codes >> 4), 2).flatten(1)
    if format == "fp8" and bool(((raw & 127) == 127).any()):
        raise ValueError("prepare_weight: argument 'codes' has NaN; expected finite weights")
    if format == "int8":
        raw = raw ^ 128  # two's complement → 128 added
    scale = scale.t().contiguous().t() if group else scale.flatten().contiguous()
    zero = None if zero is None else zero.t().contiguous().t()
    return QuantizedWeight(_words(raw, format, group), scale, zero, format, group, k)


def _words(raw: Tensor, format: str, group: int) -> Tensor:
    """uint8 codes [N, K] → int32 [N, words]."""
    (n, k), bits, length = raw.shape, BITS[format], group or SLICE
    filled = -(-k // block(format)) * block(format)
    chunks = filled // (slices(format) * length)
    raw = torch.nn.functional.pad(raw, (0, filled - k)).view(n, chunks, slices(format), length)
    halves = torch.zeros(n, chunks, length, dtype=torch.int32, device=raw.device)
    for i in range(slices(format)):
        halves |= raw[:, :, i].to(torch.int32) << bits * i
    low, high = halves.view(n, chunks * length // 2, 2).unbind(2)
    return low | high << 16


# ---- reading one -----------------------------------------------------------------------------------------------------


def unpack_weight(weight: QuantizedWeight) -> Tensor:
    """The codes [N, K] as they were before: int8, float8_e4m3fn, or uint8 0 … 15."""
    words, (n, count) = weight.words, weight.words.shape
    bits, length = BITS[weight.format], weight.group or SLICE
    halves = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), 2).view(n, 2 * count // length, length)
    raw = torch.stack([halves >> bits * i & (1 << bits) - 1 for i in range(slices(weight.format))], 2)
    raw = raw.flatten(1)[:, : weight.columns].to(torch.uint8)
    if weight.format == "int8":
        return (raw ^ 128).view(torch.int8)
    return raw.view(torch.float8_e4m3fn) if weight.format == "fp8" else raw


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The values [N, K], multiplied in fp32 (or float64 where the scale is) and rounded once."""
    wide = torch.float64 if weight.scale.dtype == torch.float64 else torch.float32
    codes, scale = unpack_weight(weight).to(wide), weight.scale.to(wide)
    if not weight.group:
        return (codes * scale[:, None]).to(dtype)
    if weight.format == "int4":
        zero = torch.full_like(scale, MIDDLE) if weight.zero is None else weight.zero.to(wide)
        codes = codes - zero.repeat_interleave(weight.group, 1)
    return (codes * scale.repeat_interleave(weight.group, 1)).to(dtype)


def _group_of(shape: tuple[int, ...], n: int, k: int, format: str) -> int:
    if format != "int4" and shape in ((n,), (n, 1)) and not (shape == (n, 1) and k in GROUPS):
        return 0
    for group in GROUPS:
        if shape == (n, k // group) and k % group == 0:
            return group
    rows = f"({n},) or " if format != "int4" else ""
    raise ValueError(
        f"prepare_weight: argument 'scale' has shape {shape} for {format} codes of a weight [{n}, {k}]; expected {rows}"
        f"({n}, K / group) with a group of 32, 64 or 128 that divides K"
    )
