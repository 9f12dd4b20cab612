"""``coalesced_access(x)``: a copy in which neighbouring lanes read neighbouring addresses: all others are measured by it."""

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, workload
from weft.operators.memory_access.pattern import LARGEST, Pattern, call, copy_plan, define, implement


def reference(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _block_missed(x: Tensor) -> Tensor:
    y = reference(x)
    y[: min(16, len(y) // 2)] = 0
    return y


pattern = Pattern("coalesced_access", reference, copy_plan)

coalesced_access = Operator(
    **define(
        pattern,
        verify=[workload(N=2000, values=values) for values in ("nonfinite", "large", "tiny")],
        bench=[workload(N=LARGEST)],
        huge=workload("bf16", N=2**31 + 17),
        wrong=[Mutant("first block missed", _block_missed)],
        tune=[workload(d, N=LARGEST) for d in ("fp32", "bf16")],
    )
)
implement(coalesced_access, pattern)


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
    return call(pattern, x)
