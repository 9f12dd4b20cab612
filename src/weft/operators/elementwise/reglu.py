"""``reglu(gate, up)``: relu(gate) · up. Source: Dauphin et al. 2016 (arXiv 1612.08083), Shazeer 2020 (arXiv 2002.05202)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.elementwise.pointwise import Pointwise, define


@triton.jit
def forward(gate, up, PRECISE: tl.constexpr):
    return tl.where(gate < 0, 0.0, gate) * up


@triton.jit
def backward(gate, up, dy, PRECISE: tl.constexpr):
    return tl.where(gate <= 0, 0.0, dy * up), dy * tl.where(gate < 0, 0.0, gate)


def reference(gate: Tensor, up: Tensor) -> Tensor:
    return torch.relu(gate) * up


call = Pointwise("reglu", ("gate", "up"), (forward, backward), reference)

WRONG = [
    Mutant("gate and up exchanged", lambda gate, up: reference(up, gate)),
    Mutant("absolute value", lambda gate, up: gate.abs() * up),
]
reglu = Operator(**define(call, flops=2, special_ops=0, backward_reads=3, wrong=WRONG))
call.implement(reglu)


@reglu.function
def reglu_function(gate: Tensor, up: Tensor) -> Tensor:
    """Gated linear unit with a rectifier. Of one packed tensor: ``reglu(*x.chunk(2, -1))``, which copies nothing.

    Args:
        gate: any shape; float32, float16 or bfloat16.
        up: the same shape, dtype and device.

    Returns:
        ``relu(gate) * up``, rounded once.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: shapes or devices that differ.
    """
    return call(gate, up)
