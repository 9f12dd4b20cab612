"""``silu(x)``: x / (1 + exp(-x)), also called swish. Source: Elfwing, Uchibe & Doya 2017 (arXiv 1702.03118)."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.elementwise.kernels import exp, logistic
from weft.operators.elementwise.pointwise import Pointwise, define


@triton.jit
def forward(x, PRECISE: tl.constexpr):
    return x / (1.0 + exp(-x, PRECISE))


@triton.jit
def backward(x, dy, PRECISE: tl.constexpr):
    s = logistic(x, PRECISE)
    return dy * tl.fma(x * s, 1.0 - s, s)


def reference(x: Tensor) -> Tensor:
    return F.silu(x)


call = Pointwise("silu", ("x",), (forward, backward), reference)

WRONG = [
    Mutant("of 1.02 x", lambda x: x * (1.02 * x).sigmoid()),
    Mutant("gradient of the sigmoid alone", lambda dy, x: (dy * x.sigmoid(),), "backward"),
]
silu = Operator(**define(call, flops=3, special_ops=2, backward_reads=2, wrong=WRONG))
call.implement(silu)


@silu.function
def silu_function(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Sigmoid linear unit, element by element.

    Args:
        x: any shape; float32, float16 or bfloat16.
        inplace: write the result over x (only where no gradient is wanted: it needs x).

    Returns:
        ``x / (1 + exp(-x))``, computed in fp32 and rounded once. With ``inplace``, x itself.

    Raises:
        TypeError: not a tensor of those dtypes.
        ValueError: ``inplace`` where a gradient is wanted.
    """
    return call(x, inplace=inplace)
