"""``swiglu(gate, up)``: silu(gate) · up, as in LLaMA. Source: Shazeer 2020 (arXiv 2002.05202)."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.elementwise.kernels import exp, logistic
from weft.operators.elementwise.pointwise import Pointwise, define


@triton.jit
def forward(gate, up, PRECISE: tl.constexpr):
    return gate / (1.0 + exp(-gate, PRECISE)) * up


@triton.jit
def backward(gate, up, dy, PRECISE: tl.constexpr):
    s = logistic(gate, PRECISE)
    y = gate * s
    return dy * up * tl.fma(y, 1.0 - s, s), dy * y


@triton.jit
def again(gate, up, dy, PRECISE: tl.constexpr):
    dgate, dup = backward(gate, up, dy, PRECISE)
    return dgate, dup, forward(gate, up, PRECISE)


def reference(gate: Tensor, up: Tensor) -> Tensor:
    wide = gate if gate.itemsize > 2 else gate.float()
    return (F.silu(wide) * up).to(gate.dtype)


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def liger(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


call = Pointwise("swiglu", ("gate", "up"), (forward, backward, again), reference)

WRONG = [
    Mutant("gate and up exchanged", lambda gate, up: reference(up, gate)),
    Mutant("sigmoid instead of silu", lambda gate, up: gate.sigmoid() * up),
]
swiglu = Operator(**define(call, flops=4, special_ops=2, backward_reads=3, tuned=True, wrong=WRONG))
call.implement(swiglu, torch_swiglu)
swiglu.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)


@swiglu.function
def swiglu_function(gate: Tensor, up: Tensor) -> Tensor:
    """Gated linear unit with silu. Of one packed tensor: ``swiglu(*x.chunk(2, -1))``, which copies nothing.

    Args:
        gate: any shape; float32, float16 or bfloat16.
        up: the same shape, dtype and device.

    Returns:
        ``silu(gate) * up``, computed in fp32 and rounded once.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: shapes or devices that differ.
    """
    return call(gate, up)
