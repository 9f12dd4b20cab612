"""Tensors for tests of operators: of random numbers, where tests run, and without memory; the memory that calls take."""

from collections.abc import Callable
from typing import Any

import torch
from where import DEVICE


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def with_memory(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call on the GPU returns, and the most bytes that it holds beside what is held already."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return call(), torch.cuda.max_memory_allocated() - before
