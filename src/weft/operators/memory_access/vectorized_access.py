"""``vectorized_access(x, width)``: a copy with one access a thread, 4, 8 or 16 bytes wide: what is under way, and when it is
too little."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.definition import Cost, Declined, Mutant, Operator, Workload, workload
from weft.operators.cuda import CudaPlan
from weft.operators.launch import Plan
from weft.operators.memory_access.kernels import copy_strided
from weft.operators.memory_access.machine import Machine, here
from weft.operators.memory_access.pattern import LARGEST, Launch, Pattern, check_line, check_whole, define, line
from weft.operators.memory_access.wide import THREADS, copy_wide

WIDTHS = (4, 8, 16)


def reference(x: Tensor, width: int = 16) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def lower(x: Tensor, width: int = 16) -> Launch:
    check_line("vectorized_access", x)
    check_whole("vectorized_access", "width", width, WIDTHS)
    return (x,), (width,)


def triton_plan(x: Tensor, width: int) -> Plan:
    """Triton gives a thread neighbouring elements: a block of so many makes it one access of ``width`` bytes."""
    block = THREADS * width // x.element_size()
    return Plan(copy_strided, (-(-x.numel() // block),), (x.numel(), 1), {"BLOCK": block}, THREADS // 32)


def cuda_plan(x: Tensor, width: int) -> CudaPlan:
    start = x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()
    if start % width:
        raise Declined(f"x does not begin on {width} bytes")
    return copy_wide(x, width, 1)


def cost(w: Workload, direction: str) -> Cost:
    size = w["N"] * w.bytes_per_element
    return Cost(reads=size, writes=size)


def predicted_share(w: Workload, machine: Machine) -> float:
    """Little's law: bytes under way = rate x latency. Every thread of a full machine waits for one access."""
    under_way = machine.multiprocessors * machine.threads * w.option("width", 16)
    return min(1.0, under_way / machine.latency / (machine.memory / 2))


def _words_swapped(x: Tensor, width: int = 16) -> Tensor:
    y, pairs = x.clone(), len(x) // 2 * 2
    y[:pairs] = x[:pairs].view(-1, 2).flip(-1).flatten()
    return y


pattern = Pattern("vectorized_access", reference, lower, lambda x, width: torch.empty_like(x), triton_plan, cuda_plan)

vectorized_access = Operator(
    **define(
        "vectorized_access",
        reference,
        options={"width": WIDTHS},
        verify=[
            *(workload(N=2000, width=width) for width in WIDTHS),
            *(workload(N=1001, width=width) for width in WIDTHS),
            *(workload(N=300, layout=layout) for layout in ("unaligned", "strided")),
            workload(N=1000, values="nonfinite"),
        ],
        bench=[workload(N=LARGEST, width=width) for width in WIDTHS],
        huge=[workload("bf16", N=2**31 + 17)],
        wrong=[Mutant("halves of a vector swapped", _words_swapped)],
    ),
    axes={"N": "elements"},
    inputs=lambda w, g, device: {"x": line(w, g, device, w["N"]), "width": w.option("width", 16)},
    cost=cost,
    predicted=lambda w, direction: predicted_share(w, here()),
)
pattern.implement(vectorized_access)


@vectorized_access.function
def vectorized_access_function(x: Tensor, width: int = 16) -> Tensor:
    """A copy with one access of ``width`` bytes a thread.

    Args:
        x: [N]; float32, float16 or bfloat16.
        width: bytes of an access: 4, 8 or 16.

    Returns:
        x's values in new memory, [N].

    Raises:
        TypeError: x is not a tensor of those dtypes, or width not an int.
        ValueError: x has not one dimension, or width is another.
    """
    return pattern(x, width)
