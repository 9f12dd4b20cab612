"""Inputs whose results are known exactly, as nccl-tests' verifiable inputs are.

Each element is a small integer that depends on its rank and index, so that a sum over the ranks is exact in the dtype
whatever the order of the additions, and an element that comes from the wrong rank or place is another number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.comm.settings import EXACT

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "uint8": torch.uint8,
}  # fmt: skip
CHUNK = 1 << 22  # elements that are filled or compared at once: indices are int64
REDUCED = -1  # in place of a source rank: the reduction over all ranks


def value(rank: Tensor | int, index: Tensor, dtype: str, op: str, ranks: int) -> Tensor:
    """Input ``index`` of ``rank``, int64. ``rank`` is a number, or a tensor like ``index``."""
    mixed = index * 31 + rank * 23 + index // (rank + 7) * 13
    if op == "prod":  # 1 or 2, and more than 1 on so few ranks that the product is exact
        return torch.where(
            torch.as_tensor(rank, device=index.device) < EXACT[dtype].bit_length() - 2, 1 + mixed // 3 % 2, 1
        )
    if op in ("min", "max"):
        return mixed % (min(EXACT[dtype], 61) + 1)
    found = mixed % (max(min(EXACT[dtype] // ranks, 61), 1) + 1)
    return torch.where(torch.as_tensor(rank, device=index.device) < EXACT[dtype], found, 0)


def reduced(index: Tensor, dtype: str, op: str, ranks: int) -> Tensor:
    """What all ranks get at ``index``, float64."""
    total = value(0, index, dtype, op, ranks)
    for rank in range(1, ranks):
        x = value(rank, index, dtype, op, ranks)
        match op:
            case "prod":
                total = total * x
            case "min":
                total = torch.minimum(total, x)
            case "max":
                total = torch.maximum(total, x)
            case _:
                total = total + x
    return total.double() / ranks if op == "avg" else total.double()


def fill(x: Tensor, rank: int, dtype: str, op: str, ranks: int) -> None:
    """The inputs of a rank."""
    for begin in range(0, x.numel(), CHUNK):
        part = x[begin : begin + CHUNK]
        index = torch.arange(begin, begin + part.numel(), device=x.device)
        part.copy_(value(rank, index, dtype, op, ranks).double().to(x.dtype))


def poison(x: Tensor) -> None:
    """Fills an output with what no collective returns."""
    x.view(torch.uint8).fill_(0x7B)  # a NaN or a large number in no input


def wrong(x: Tensor, expected: Callable[[Tensor], tuple[Any, Tensor]], dtype: str, op: str, ranks: int) -> int:
    """How many elements of an output differ from ``expected(index)``: the source rank (or REDUCED) and its index.

    Exact but for ``avg`` where the number of ranks is no power of two: there two units in the last place are allowed.
    """
    count = 0
    for begin in range(0, x.numel(), CHUNK):
        part = x[begin : begin + CHUNK]
        source, index = expected(torch.arange(begin, begin + part.numel(), device=x.device))
        if isinstance(source, int) and source == REDUCED:
            right = reduced(index, dtype, op, ranks)
        else:
            right = value(source, index, dtype, op, ranks).double()
        got = part.double()
        if op == "avg" and ranks & (ranks - 1) and x.dtype.is_floating_point:
            same = (got - right).abs() <= 2 * torch.finfo(x.dtype).eps * right.abs()
        else:
            same = got == right.to(x.dtype).double()
        count += part.numel() - int(same.sum())
    return count
