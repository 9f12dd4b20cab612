"""``Linear``: PyTorch's module over weft's operators, its products in fp8 if asked."""

from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.operators.call import cast_for_products

# T tokens, N outputs, K inputs


class Linear(torch.nn.Linear):
    """As ``torch.nn.Linear``: arguments, ``state_dict``, results and gradients.

    Args:
        fp8: the product and the gradient by x are of fp8 numbers (e4m3, gradients e5m2), with a scale for each row, made anew
            in each call; the weight's gradient is of unquantised ones. Parameters stay as they are.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, *,
        fp8: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.fp8 = fp8

    def forward(self, x: Tensor) -> Tensor:
        if not self.fp8:
            y: Tensor = ops.linear(x, self.weight, self.bias)
            return y
        x, weight, bias = cast_for_products(x, self.weight, self.bias)
        y = _Fp8.apply(x.reshape(-1, x.shape[-1]), weight)
        y = y.view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return super().extra_repr() + (", fp8=True" if self.fp8 else "")


class _Fp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, "fp8_e4m3", x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = _product(dy, weight.t(), "fp8_e5m2", x.dtype) if ctx.needs_input_grad[0] else None
        return dx, ops.matmul(dy.t(), x) if ctx.needs_input_grad[1] else None


def _product(a: Tensor, weight: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """[T, N] = a [T, K] · weight [N, K]ᵀ, each row of both with a scale of its own."""
    a, a_scale = ops.quantize(a.contiguous(), format, "row")
    weight, scale = ops.quantize(weight.contiguous(), "fp8_e4m3", "row")
    found: Tensor = ops.scaled_matmul(a, weight.t(), a_scale, scale.t(), dtype=dtype)
    return found
