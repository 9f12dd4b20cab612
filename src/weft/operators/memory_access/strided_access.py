"""``strided_access(x, stride)``: every stride-th element, packed. The bytes between them come along and are thrown away."""

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Workload, workload
from weft.operators.memory_access.machine import Machine
from weft.operators.memory_access.pattern import LARGEST, Pattern, call, copy_plan, define, implement

BENCH = [workload(N=LARGEST // stride, stride=stride) for stride in (1, 2, 4, 8, 16, 32)]


def reference(x: Tensor, stride: int = 2) -> Tensor:
    return x[::stride].clone(memory_format=torch.contiguous_format)


def result(x: Tensor, stride: int) -> Tensor:
    return torch.empty(-(-x.numel() // stride), dtype=x.dtype, device=x.device)


def predicted_share(w: Workload, machine: Machine) -> float:
    """Useful bytes over bytes moved: an element brings all up to the next one, until the next lies in another fetch."""
    size = w.bytes_per_element
    return 2 * size / (min(w.option("stride", 2) * size, machine.fetch) + size)


pattern = Pattern("strided_access", reference, copy_plan, option=("stride", range(1, 33), 2), result=result)

strided_access = Operator(
    **define(
        pattern,
        axis="elements of the result",
        length=lambda n, stride: max((n - 1) * stride + 1, 0),  # x ends with the last element that is read
        verify=[
            *(workload(N=700, stride=stride) for stride in (1, 3, 8, 31, 32)),
            workload(N=1000, values="nonfinite"),
        ],
        bench=BENCH,
        huge=workload("bf16", N=2**29 + 5, stride=5),
        wrong=[
            Mutant("stride ignored", lambda x, stride=2: x[: -(-len(x) // stride)].clone()),
            Mutant("starts at one", lambda x, stride=2: torch.cat([x[1:], x[:1]])[::stride].clone()),
        ],
        predicted=predicted_share,
        tune=[w.at(d) for w in BENCH[1:] for d in ("fp32", "bf16")],
    )
)
implement(strided_access, pattern)


@strided_access.function
def strided_access_function(x: Tensor, stride: int = 2) -> Tensor:
    """Every stride-th element of x, packed.

    Args:
        x: [N]; float32, float16 or bfloat16.
        stride: elements from one that is read to the next, 1 … 32.

    Returns:
        ``x[::stride]`` in new memory.

    Raises:
        TypeError: x is not a tensor of those dtypes, or stride not an int.
        ValueError: x has not one dimension, or stride is out of range.
    """
    return call(pattern, x, stride)
