"""``misaligned_access(x, offset)``: a copy that starts in the middle of a line, so that accesses cannot be wide."""

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, workload
from weft.operators.memory_access.pattern import LARGEST, Pattern, call, copy_plan, define, implement


def reference(x: Tensor, offset: int = 1) -> Tensor:
    return x[offset:].clone(memory_format=torch.contiguous_format)


option, tail = ("offset", range(32), 1), lambda x, offset: ((x[offset:],), ())
pattern = Pattern("misaligned_access", reference, copy_plan, option=option, tensors=tail)

misaligned_access = Operator(
    **define(
        pattern,
        axis="elements of the result",
        length=lambda n, offset: n + offset if n else 0,
        verify=[
            *(workload(N=1000, offset=offset) for offset in (0, 2, 3, 4, 8, 31)),
            workload(N=1000, values="nonfinite"),
        ],
        bench=[workload(N=LARGEST, offset=offset) for offset in (0, 1, 2, 4, 8, 31)],
        huge=workload("bf16", N=2**31 + 17, offset=3),
        wrong=[
            Mutant("offset ignored", lambda x, offset=1: x[: max(len(x) - offset, 0)].clone()),
            Mutant(
                "offset rounded to vectors", lambda x, offset=1: x.roll(-(offset // 4 * 4))[: len(x) - offset].clone()
            ),
        ],
    )
)
implement(misaligned_access, pattern)


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
    return call(pattern, x, offset)
