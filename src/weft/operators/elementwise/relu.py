"""``relu(x)``: max(x, 0). Forward reads x and writes y; backward reads y and dy and writes dx: nothing but bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.elementwise.definition import define
from weft.operators.elementwise.pointwise import Pointwise


@triton.jit
def forward(x, PRECISE: tl.constexpr):
    return tl.where(x < 0, 0.0, x)  # NaN passes through


@triton.jit
def backward(y, dy, PRECISE: tl.constexpr):
    return tl.where(y <= 0, 0.0, dy)


def reference(x: Tensor) -> Tensor:
    return torch.relu(x)


pointwise = Pointwise("relu", ("x",), forward, backward, reference, from_result=True)

relu = Operator(
    **define(
        "relu",
        ("x",),
        reference,
        flops=1,
        special_ops=0,
        backward_reads=2,
        tuned=True,
        exact=True,
        wrong=[
            Mutant("leaks", lambda x: torch.nn.functional.leaky_relu(x, 1e-3)),
            Mutant("NaN to zero", lambda x: x.nan_to_num(0.0, torch.inf, -torch.inf).clamp_min(0)),
            Mutant("gradient at zero results", lambda dy, x: (dy.clone(),), "backward"),
        ],
    )
)
pointwise.implement(relu)


@relu.function
def relu_function(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Rectifier, element by element.

    Args:
        x: any shape; float32, float16 or bfloat16.
        inplace: write the result over x. Gradients still work: they are computed from the result.

    Returns:
        ``max(x, 0)``, the same bits as PyTorch's; NaN stays NaN. With ``inplace``, x itself.

    Raises:
        TypeError: not a tensor of those dtypes.
    """
    return pointwise(x, inplace=inplace)
