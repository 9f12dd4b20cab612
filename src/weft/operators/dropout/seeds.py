"""What a mask depends on besides the index of an element: probability, seed and offset, checked or drawn."""

from typing import Any

import torch
from torch import Tensor

from weft.operators.checks import check_device, check_flag, check_value, is_int, is_number

Seed = int | Tensor | None
STEPS = 2**16  # p is a multiple of 1 / STEPS: an element has 16 random bits
OFFSETS = 2**62  # a caller's are below; drawn ones above, which no kernel of PyTorch uses with the same seed


def threshold_of(p: float) -> int:
    """An element is dropped when its 16 bits are below."""
    return round(p * STEPS)


def scale_of(threshold: int) -> float:
    """1 / (1 − p) of the p that is used, so that the expectation is x (0 where everything is dropped)."""
    return STEPS / (STEPS - threshold) if threshold < STEPS else 0.0


def draw(device: torch.device) -> tuple[int | Tensor, int]:
    """A seed and an offset that no other call has, from PyTorch's default generator of the device, without waiting for the
    device: its seed, and its offset, which is moved on as PyTorch's dropout does. While a CUDA graph is captured, a tensor
    that every replay draws anew."""
    if device.type != "cuda":
        return int(torch.randint(2**63 - 1, (), device="cpu")), 0
    if torch.cuda.is_current_stream_capturing():
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=device), 0
    generator = torch.cuda.default_generators[device.index or 0]
    offset: int = generator.get_offset()
    generator.set_offset(offset + 4)  # the least that it moves by
    return generator.initial_seed(), OFFSETS + offset


def check_probability(operator: str, p: Any, training: Any) -> None:
    check_value(operator, "p", p, is_number(p) and 0 <= p <= 1, "a probability, 0 … 1")
    check_flag(operator, "training", training)


def check_seed(operator: str, x: Tensor, seed: Any, offset: Any) -> None:
    check_value(operator, "offset", offset, is_int(offset) and 0 <= offset < OFFSETS, "an int, 0 … 2**62 − 1")
    check_value(operator, "offset", offset, seed is not None or not offset, "a seed beside an offset ('seed' is None)")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"{operator}: argument 'seed' is a tensor of shape {tuple(seed.shape)} and dtype {seed.dtype}; expected an "
                "int, or one element of torch.int64"
            )
        check_device(operator, "seed", seed, "x", x)
    elif seed is not None:
        fits = is_int(seed) and -(2**63) <= seed < 2**64
        check_value(operator, "seed", seed, fits, "an int of 64 bits, a tensor or None")
