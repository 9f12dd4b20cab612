"""States in 8 bits in PyTorch: blocks of neighbours in memory, their codes and scales; equal to ``block_codes`` to rounding."""

import torch
from torch import Tensor

from weft.operators.optimizer import dynamic_map
from weft.operators.quantization.formats import random_sixteen, rounded

BLOCKS = (128, 256, 512, 1024, 2048)
STATE_FORMATS = ("dynamic", "fp8")
SMALLEST = 2.0**-126  # a block whose largest magnitude is below counts as 0
LARGEST_E4M3 = 448.0


def blocks_of(elements: int, block: int) -> int:
    return -(-elements // block)


def flat(t: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, as a view."""
    return t.as_strided((t.numel(),), (1,))


def random_bits(elements: int, seed: int, state: int, row: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each element: a function of seed, state, row of the table, steps done and place in memory."""
    key = seed ^ ((state + 1) << 61)  # Philox's for a state of this number: another one than that of weights
    return random_sixteen((elements,), key, (row << 32) | count, device)


def dequantize(codes: Tensor, scales: Tensor, block: int, signed: bool, format: str) -> Tensor:
    """What codes (uint8, dense) stand for, in the scales' dtype, with the codes' shape and strides."""
    made = torch.empty_like(codes, dtype=scales.dtype)
    code = flat(codes)
    if format == "fp8":
        values = code.view(torch.float8_e4m3fn).to(scales.dtype) / LARGEST_E4M3
        values = values if signed else values.square()
    else:
        table = dynamic_map.values(signed)
        values = torch.tensor(table, dtype=scales.dtype, device=codes.device)[code.long()]
    flat(made).copy_(values * scales.repeat_interleave(block)[: code.numel()])
    return made


def quantize(
    x: Tensor, codes: Tensor, scales: Tensor, block: int, signed: bool, format: str, bits: Tensor | None = None
) -> None:
    """Writes codes and scales of x.

    Args:
        x: [...] fp32 or fp64; where it is not signed, none is negative.
        codes: [...] uint8, dense.
        scales: [blocks], the largest magnitude of each.
        bits: 16 random ones for each element in memory order; None rounds to the interval (dynamic) or to nearest (fp8).
    """
    n = x.numel()
    x_flat = flat(torch.empty_like(codes, dtype=x.dtype).copy_(x))
    rows = torch.nn.functional.pad(x_flat, (0, len(scales) * block - n)).view(-1, block)
    largest = rows.abs().amax(1) if n else rows.new_zeros(0)
    sound = (largest >= SMALLEST) & largest.isfinite()
    y = (rows / torch.where(sound, largest, torch.inf)[:, None]).view(-1)[:n]
    y = torch.where(x_flat.isfinite(), y + 0.0, torch.nan)  # no negative 0
    if format == "fp8":
        scaled = (y if signed else y.sqrt()) * LARGEST_E4M3
        made = rounded(scaled.float(), "fp8_e4m3", bits).view(torch.uint8)
        made = torch.where(y.isnan(), 0x7F, made)
        if not signed:
            made = torch.where(y > 0, made.clamp_min(1), made)
    else:
        made = dynamic_map.encode(y, signed, None if bits is None else (bits.to(x.dtype) + 0.5) / 65536)
    flat(codes).copy_(made)
    scales.copy_(largest)
