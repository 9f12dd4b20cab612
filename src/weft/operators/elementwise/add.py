"""``add(x, y)``: the sum of two tensors of shapes that broadcast, without memory for the broadcast one."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.elementwise.pointwise import Pointwise, define


@triton.jit
def forward(x, y, PRECISE: tl.constexpr):
    return x + y


def reference(x: Tensor, y: Tensor) -> Tensor:
    return x + y


call = Pointwise("add", ("x", "y"), (forward, None), reference)

WRONG = [Mutant("x twice", lambda x, y: x + x), Mutant("y less a part in 500", lambda x, y: x + 0.998 * y)]
# directions: the gradient is the result's own: nothing is computed
add = Operator(**define(call, flops=1, special_ops=0, tuned=True, exact=True, directions=("forward",), wrong=WRONG))
call.implement(add)


@add.function
def add_function(x: Tensor, y: Tensor) -> Tensor:
    """Sum of two tensors, with broadcasting.

    Args:
        x: any shape; float32, float16 or bfloat16.
        y: a shape that broadcasts with x's (NumPy's rules); the same dtype and device.

    Returns:
        ``x + y``, rounded once from fp32; the same bits as PyTorch's.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: shapes that do not broadcast, or devices that differ.
    """
    return call(*broadcast(x, y))


def broadcast(x: Any, y: Any) -> tuple[Any, Any]:
    """Views of one shape; whatever are no tensors passes through to the check that says so."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.shape == y.shape:
        return x, y
    try:
        common = torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        raise ValueError(
            f"add: argument 'y' has shape {tuple(y.shape)} and 'x' has {tuple(x.shape)}; expected shapes that broadcast"
        ) from None
    return x.expand(common), y.expand(common)
