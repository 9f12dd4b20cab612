"""Every operator of the registry, with workloads and arguments drawn for it: for tests of what is asked of all of them."""

import math

import pytest
import torch
from where import DEVICE

from weft import registry
from weft.definition import Operator, Workload

OPERATORS = registry.select()


def by_name(things):
    return pytest.mark.parametrize("op", things, ids=lambda op: op.name)


def small(op: Operator, dtype: str = "fp32", *, options: bool = False) -> list[Workload]:
    """Verify workloads that are neither empty nor large, by rising size; contiguous ordinary numbers unless ``options``."""
    plain = [w for w in op.cases("verify", [dtype]) if (options or not w.options) and math.prod(w.axes.values()) > 0]
    return sorted(plain, key=lambda w: math.prod(w.axes.values()))


def middling(op: Operator, dtype: str = "fp32") -> Workload:
    """An ordinary point that the kernel itself takes (some decline what is not a multiple of 16 bytes)."""
    points = small(op, dtype) or small(op, dtype, options=True)
    even = [w for w in points if list(w.axes.values())[-1] % 8 == 0]
    return (even or points)[:3][-1]


def drawn(op: Operator, w: Workload, seed: int = 0, device: str = DEVICE):
    return op.inputs(w, torch.Generator(device).manual_seed(seed), device)
