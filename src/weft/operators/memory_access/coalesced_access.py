"""``coalesced_access(x)``: a copy in which neighbouring lanes read neighbouring addresses: all others are measured by it."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Workload, workload
from weft.operators.memory_access.kernels import copy_plan
from weft.operators.memory_access.machine import Machine, here
from weft.operators.memory_access.pattern import LARGEST, Launch, Pattern, check_line, define, line


def reference(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def lower(x: Tensor) -> Launch:
    check_line("coalesced_access", x)
    return (x,), ()


def cost(w: Workload, direction: str) -> Cost:
    size = w["N"] * w.bytes_per_element
    return Cost(reads=size, writes=size)


def predicted_share(w: Workload, machine: Machine) -> float:
    """Every byte of every sector is used: all of the ceiling."""
    return 1.0


def _block_missed(x: Tensor) -> Tensor:
    y = reference(x)
    y[: min(16, len(y) // 2)] = 0
    return y


pattern = Pattern("coalesced_access", reference, lower, torch.empty_like, copy_plan)

coalesced_access = Operator(
    **define(
        "coalesced_access",
        reference,
        options={},
        verify=[
            *(workload(N=1000, layout=layout) for layout in ("unaligned", "strided")),
            *(workload(N=2000, values=values) for values in ("nonfinite", "large", "tiny")),
        ],
        bench=[workload(N=LARGEST)],
        huge=[workload("bf16", N=2**31 + 17)],
        wrong=[Mutant("first block missed", _block_missed)],
    ),
    axes={"N": "elements"},
    inputs=lambda w, g, device: {"x": line(w, g, device, w["N"])},
    cost=cost,
    predicted=lambda w, direction: predicted_share(w, here()),
)
coalesced_access.workloads = {
    **coalesced_access.workloads,
    "tune": [workload(d, N=LARGEST) for d in ("fp32", "bf16")],
}
pattern.implement(coalesced_access)


@coalesced_access.function
def coalesced_access_function(x: Tensor) -> Tensor:
    """A copy, lane beside lane.

    Args:
        x: [N]; float32, float16 or bfloat16.

    Returns:
        x's values in new memory, [N].

    Raises:
        TypeError: not a tensor of those dtypes.
        ValueError: x has not one dimension.
    """
    return pattern(x)
