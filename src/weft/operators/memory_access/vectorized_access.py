"""``vectorized_access(x, width)``: a copy with one access a thread, 4, 8 or 16 bytes wide: what is in flight, and when it is
too little."""

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Workload, workload
from weft.operators.launch import Plan
from weft.operators.memory_access.machine import Machine
from weft.operators.memory_access.pattern import LARGEST, THREADS, Pattern, call, copy_strided, define, implement

WIDTHS = (4, 8, 16)


def reference(x: Tensor, width: int = 16) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def triton_plan(x: Tensor, width: int) -> Plan:
    """Triton gives a thread neighbouring elements: a block of so many makes it one access of ``width`` bytes."""
    block = THREADS * width // x.element_size()
    return Plan(copy_strided, (-(-x.numel() // block),), (x.numel(), 1), {"BLOCK": block}, THREADS // 32)


def predicted_share(w: Workload, machine: Machine) -> float:
    """Little's law: bytes in flight = rate x latency. Every thread of a full machine waits for one access."""
    in_flight = machine.multiprocessors * machine.threads * w.option("width", 16)
    return min(1.0, in_flight / machine.latency / (machine.memory / 2))


def _words_swapped(x: Tensor, width: int = 16) -> Tensor:
    y, pairs = x.clone(), len(x) // 2 * 2
    y[:pairs] = x[:pairs].view(-1, 2).flip(-1).flatten()
    return y


pattern = Pattern("vectorized_access", reference, triton_plan, option=("width", WIDTHS, 16))

vectorized_access = Operator(
    **define(
        pattern,
        verify=[
            *(workload(N=n, width=width) for n in (2000, 1001) for width in WIDTHS),
            workload(N=1000, values="nonfinite"),
        ],
        bench=[workload(N=LARGEST, width=width) for width in WIDTHS],
        huge=workload("bf16", N=2**31 + 17),
        wrong=[Mutant("halves of a vector swapped", _words_swapped)],
        predicted=predicted_share,
    )
)
implement(vectorized_access, pattern)


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
    return call(pattern, x, width)
