"""``relu(x)``: max(x, 0). Forward reads x and writes y: nothing but bandwidth.

The gradient needs one bit of each element. Where a gradient is wanted, forward packs these bits (1/32 of a float32 tensor),
so backward reads dy and the bits instead of dy and y, and x may be overwritten.
"""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.autograd import KernelFunction
from weft.operators.elementwise.dispatch import Formula, laid_out
from weft.operators.elementwise.kernels import relu as forward
from weft.operators.elementwise.pointwise import GRADIENT_KERNEL, KERNEL, Map, Pointwise, define
from weft.operators.layout import rows_of


def reference(x: Tensor) -> Tensor:
    return torch.relu(x)


class Relu(KernelFunction):
    @staticmethod
    def forward(ctx: Any, formula: Formula, in_place: bool, plan: Any, x: Tensor) -> Tensor:
        if not any(ctx.needs_input_grad):
            return Map.forward(ctx, formula, in_place, plan, x)
        y = x if in_place else torch.empty_like(x)
        if in_place:
            ctx.mark_dirty(y)
        launch, shape, ctx.stride = KERNEL.of((x,), formula, in_place, True)
        bits = torch.empty(shape, dtype=torch.uint8, device=x.device)
        ctx.save_for_backward(bits)
        if y.numel():
            launch(x, y, bits)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, Gradient.apply(dy, *ctx.saved_tensors, ctx.stride)


class Gradient(KernelFunction):
    """dx of dy: linear, so it is its own gradient."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, bits: Tensor, stride: tuple[int, ...]) -> Tensor:
        ctx.stride = stride
        ctx.save_for_backward(bits)
        dx = torch.empty_strided(dy.size(), stride, dtype=dy.dtype, device=dy.device)
        if dx.numel():
            fits = rows_of(dy) if bits.shape[0] > 1 else laid_out(dy, dx)
            if fits is None or bits.shape[0] not in (1, fits[0]):
                dy = torch.empty_like(dx).copy_(dy)  # autograd may bring one of any strides (expanded, say)
            GRADIENT_KERNEL.of((dx, dy), call.formula, bits.shape[0])(dy, bits, dx)
        return dx

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return Gradient.apply(g, *ctx.saved_tensors, ctx.stride), None, None


call = Pointwise("relu", ("x",), (forward, None), reference, function=Relu)

WRONG = [
    Mutant("leaks", lambda x: torch.nn.functional.leaky_relu(x, 1e-3)),
    Mutant("NaN to zero", lambda x: x.nan_to_num(0.0, torch.inf, -torch.inf).clamp_min(0)),
    Mutant("gradient passes everywhere", lambda dy, x: (dy.clone(),), "backward"),
]
relu = Operator(
    **define(call, flops=1, special_ops=0, backward_reads=1, backward_bits=1, tuned=True, exact=True, wrong=WRONG)
)
call.implement(relu)


@relu.function
def relu_function(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Rectifier, element by element.

    Args:
        x: any shape; float32, float16 or bfloat16.
        inplace: write the result over x. Gradients still work: they are taken from one bit an element.

    Returns:
        ``max(x, 0)``, the same bits as PyTorch's; NaN stays NaN. With ``inplace``, x itself.

    Raises:
        TypeError: not a tensor of those dtypes.
    """
    return call(x, inplace=inplace)
