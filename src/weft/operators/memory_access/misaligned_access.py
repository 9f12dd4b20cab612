"""``misaligned_access(x, offset)``: a copy that starts in the middle of a line, so that accesses cannot be wide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Workload, workload
from weft.operators.cuda import CudaPlan
from weft.operators.memory_access.kernels import copy_plan
from weft.operators.memory_access.machine import Machine, here
from weft.operators.memory_access.pattern import LARGEST, Launch, Pattern, check_line, check_whole, define, line
from weft.operators.memory_access.wide import copy_wide

OFFSETS = range(32)
BYTES_A_THREAD = 64  # however narrow the accesses are


def reference(x: Tensor, offset: int = 1) -> Tensor:
    return x[offset:].clone(memory_format=torch.contiguous_format)


def lower(x: Tensor, offset: int = 1) -> Launch:
    check_line("misaligned_access", x)
    check_whole("misaligned_access", "offset", offset, OFFSETS)
    return (x[offset:],), ()


def allowed_width(x: Tensor) -> int:
    """Bytes of the widest access that x's first element allows: 16, or less where it does not lie on 16."""
    first = int(x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()) % 16
    return 16 if first == 0 else first & -first


def wide_plan(x: Tensor) -> CudaPlan:
    width = allowed_width(x)
    return copy_wide(x, width, BYTES_A_THREAD // width)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    offset = w.option("offset", 1)
    return {"x": line(w, g, device, w["N"] + offset if w["N"] else 0), "offset": offset}


def cost(w: Workload, direction: str) -> Cost:
    size = w["N"] * w.bytes_per_element
    return Cost(reads=size, writes=size)


def predicted_share(w: Workload, machine: Machine) -> float:
    """All of the ceiling: the sector that two warps share is fetched once and found in L1 or L2 by the second."""
    return 1.0


pattern = Pattern("misaligned_access", reference, lower, torch.empty_like, copy_plan, wide_plan)

misaligned_access = Operator(
    **define(
        "misaligned_access",
        reference,
        options={"offset": OFFSETS},
        verify=[
            *(workload(N=1000, offset=offset) for offset in (0, 2, 3, 4, 8, 31)),
            *(workload(N=300, layout=layout) for layout in ("unaligned", "strided")),
            workload(N=1000, values="nonfinite"),
        ],
        bench=[workload(N=LARGEST, offset=offset) for offset in (0, 1, 2, 4, 8, 31)],
        huge=[workload("bf16", N=2**31 + 17, offset=3)],
        wrong=[
            Mutant("offset ignored", lambda x, offset=1: x[: max(len(x) - offset, 0)].clone()),
            Mutant(
                "offset rounded to vectors", lambda x, offset=1: x.roll(-(offset // 4 * 4))[: len(x) - offset].clone()
            ),
        ],
    ),
    axes={"N": "elements of the result"},
    inputs=inputs,
    cost=cost,
    predicted=lambda w, direction: predicted_share(w, here()),
)
pattern.implement(misaligned_access)


@misaligned_access.function
def misaligned_access_function(x: Tensor, offset: int = 1) -> Tensor:
    """A copy of x from its element ``offset`` on.

    Args:
        x: [N]; float32, float16 or bfloat16.
        offset: the first element that is read, 0 … 31.

    Returns:
        ``x[offset:]`` in new memory.

    Raises:
        TypeError: x is not a tensor of those dtypes, or offset not an int.
        ValueError: x has not one dimension, or offset is out of range.
    """
    return pattern(x, offset)
