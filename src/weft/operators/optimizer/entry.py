"""What the engine is told of a parameter: its tensors, its group, how its weight is rounded and its states are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.operators.optimizer import block_codes

# by their number in the kernels
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int16: 3, torch.uint8: 4}
ROUNDINGS = ("nearest", "stochastic", "split")  # by their number in the kernels
FORMATS = {  # of states in 8 bits: the types of one with a sign and of one without, by their number in the kernels
    "dynamic": (block_codes.SIGNED.value, block_codes.UNSIGNED.value),
    "fp8": (block_codes.E4M3.value, block_codes.E4M3_ROOT.value),
}


@dataclass(frozen=True)
class Codes:
    """States in 8 bits.

    Args:
        scales: of each of the rule's states, fp32, the largest magnitude of each block of neighbours in memory.
        block: elements of a block, 128 … 2048, a power of two.
        format: ``dynamic`` or ``fp8``.
        stochastic: codes are rounded up or down at random.
    """

    scales: tuple[Tensor, ...]
    block: int = 256
    format: str = "dynamic"
    stochastic: bool = False


@dataclass(frozen=True)
class Entry:
    """A parameter as the engine sees it.

    Args:
        param: float32, float16 or bfloat16, dense in memory.
        states: the rule's, of the same strides (where ``codes`` says so, uint8); behind them the int16 lower half of a split
            weight.
        step: one fp32, the number of steps done, where the rule or the rounding wants it.
        options: of its group.
        group: number of the group: its row of the numbers.
        rounding: ``nearest``, ``stochastic`` or ``split``.
        gradient: the gradient's dtype.
        codes: how the rule's states are kept in 8 bits, or None.
    """

    param: Tensor
    states: tuple[Tensor, ...]
    step: Tensor | None
    options: dict[str, Any]
    group: int = 0
    rounding: str = "nearest"
    gradient: torch.dtype = torch.float32
    seed: int = 0
    codes: Codes | None = None


def check_apart(params: Sequence[Tensor]) -> None:
    """Raises ValueError where two dense tensors of one device share memory: programs would update it in any order."""
    if params[0].device.type == "meta":
        return
    begin = np.array([p.data_ptr() for p in params])
    size = np.array([p.numel() * p.element_size() for p in params])
    order = np.argsort(begin, kind="stable")
    order = order[size[order] > 0]
    ends = np.maximum.accumulate((begin + size)[order])
    for at in np.flatnonzero(begin[order][1:] < ends[:-1])[:1]:
        a, b = sorted((int(order[at]), int(order[at + 1])))
        raise ValueError(
            f"parameters {a} and {b} of those on {params[0].device}, of shapes {tuple(params[a].shape)} and "
            f"{tuple(params[b].shape)}, share memory; expected tensors that do not overlap (a tied weight is one parameter)"
        )
