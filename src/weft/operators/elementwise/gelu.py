"""``gelu(x)``: x Φ(x), or its tanh form. Source: Hendrycks & Gimpel 2016 (arXiv 1606.08415)."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.elementwise.kernels import exp, gelu_slope, normal_cdf, tanh_argument, tanh_cdf, tanh_gelu_slope
from weft.operators.elementwise.pointwise import Pointwise, define


@triton.jit
def forward(x, PRECISE: tl.constexpr):
    return x * normal_cdf(x, PRECISE)


@triton.jit
def backward(x, dy, PRECISE: tl.constexpr):
    return dy * gelu_slope(x, normal_cdf(x, PRECISE), PRECISE)


@triton.jit
def forward_tanh(x, PRECISE: tl.constexpr):
    return x / (1.0 + exp(-tanh_argument(x), PRECISE))


@triton.jit
def backward_tanh(x, dy, PRECISE: tl.constexpr):
    phi, rest = tanh_cdf(x, PRECISE)
    return dy * tanh_gelu_slope(x, phi, rest)


def reference(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return F.gelu(x, approximate="tanh")
    wide = x if x.itemsize > 2 else x.float()
    return (wide * (0.5 + 0.5 * torch.erf(wide * 0.5**0.5))).to(x.dtype)  # F.gelu(inf) is NaN on a CPU, inf on a GPU


def terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """How large the terms are that x Φ(x) and its slope are sums of: they cancel where x is negative, so that an error of
    either is no smaller than theirs, however the sum comes out. Of both forms: they differ by less than 1 %."""
    phi = 0.5 + 0.5 * torch.erf(x * 0.5**0.5).abs()
    return x.abs() * phi, phi + x.abs() * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5


FORMULAS = {"none": (forward, backward), "tanh": (forward_tanh, backward_tanh)}
call = Pointwise("gelu", ("x",), FORMULAS, reference, option="approximate", heavy=True)

WRONG = [
    Mutant("of the other form", lambda x, approximate="none": F.gelu(x, approximate="tanh")),
    Mutant("by the sigmoid of 1.702 x", lambda x, approximate="none": x * (1.702 * x).sigmoid()),
    Mutant("density left out", lambda dy, x, approximate="none": (dy * torch.special.ndtr(x.double()).to(x.dtype),),
           "backward"),
]  # fmt: skip
# ulps: x, erf, two sums and a product: four roundings
gelu = Operator(**define(
    call, flops=12, special_ops=2, backward_reads=2, tuned=True, ulps=2.0, wrong=WRONG,
    backward_scale=lambda arguments, gradients: [gradients[0].abs() * terms(arguments["x"])[1]],
))  # fmt: skip
call.implement(gelu, lambda x, approximate="none": F.gelu(x, approximate=approximate))


@gelu.function
def gelu_function(x: Tensor, approximate: str = "none", *, inplace: bool = False) -> Tensor:
    """Gaussian error linear unit, element by element.

    Args:
        x: any shape; float32, float16 or bfloat16.
        approximate: ``none`` for x Φ(x); ``tanh`` for 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))).
        inplace: write the result over x (only where no gradient is wanted: it needs x).

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once. With ``inplace``, x itself.

    Raises:
        TypeError: not a tensor of those dtypes.
        ValueError: another ``approximate``; ``inplace`` where a gradient is wanted.
    """
    return call(x, choice=approximate, inplace=inplace)
