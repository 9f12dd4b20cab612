"""``add(x, y)``: the sum of two tensors of shapes that broadcast, without memory for the broadcast one."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.call import Choice, guarded
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
def add_function(x: Tensor, y: Tensor | float, *, alpha: float = 1) -> Tensor:
    """Sum of two tensors, with broadcasting, or of a tensor and a number.

    Args:
        x: any shape; float32, float16 or bfloat16.
        y: a shape that broadcasts with x's (NumPy's rules) on the same device, or a number. Of two dtypes the result has the
            one that ``torch.add`` gives.
        alpha: multiplies y. Another one than 1, and a number y, are handed to PyTorch.

    Returns:
        ``x + alpha * y``, rounded once from fp32; the same bits as PyTorch's.

    Raises:
        TypeError: not tensors of those dtypes, y or alpha no number.
        ValueError: shapes that do not broadcast, or devices that differ.
    """
    if alpha != 1 or not isinstance(y, Tensor):
        choose(x, y, alpha=alpha)  # checks
        return torch.add(x, y, alpha=alpha)
    return call(*broadcast(x, y))


@add.choice
@guarded
def choose(x: Tensor, y: Any, *, alpha: float = 1, direction: str = "forward") -> Choice:
    for name, number in (("alpha", alpha), *([] if isinstance(y, Tensor) else [("y", y)])):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            expected = "a number" if name == "alpha" else "a torch.Tensor or a number"
            raise TypeError(f"add: argument '{name}' is {number!r:.40}; expected {expected}")
    chosen = call.choose(*broadcast(x, y if isinstance(y, Tensor) else x), direction=direction)
    return chosen if alpha == 1 and isinstance(y, Tensor) else Choice("torch", "a number y, or an alpha: PyTorch's add")


def broadcast(x: Any, y: Any) -> tuple[Any, Any]:
    """Views of one shape; whatever is no tensor passes through to the check that says so."""
    if not isinstance(x, Tensor) or x.shape == y.shape:
        return x, y
    if x.dtype != y.dtype and 0 in (x.ndim, y.ndim):  # a scalar tensor does not promote the other one
        x, y = (t.to(torch.result_type(x, y)) for t in (x, y))
    try:
        common = torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        raise ValueError(
            f"add: argument 'y' has shape {tuple(y.shape)} and 'x' has {tuple(x.shape)}; expected shapes that broadcast"
        ) from None
    return x.expand(common), y.expand(common)
