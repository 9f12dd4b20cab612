"""``geglu(gate, up)``: gelu(gate) · up, with Φ or its tanh form. Source: Shazeer 2020 (arXiv 2002.05202)."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Declined, Mutant, Operator
from weft.operators.elementwise.gelu import reference as gelu_reference
from weft.operators.elementwise.gelu import terms
from weft.operators.elementwise.kernels import exp, gelu_slope, normal_cdf, tanh_argument, tanh_cdf, tanh_gelu_slope
from weft.operators.elementwise.pointwise import Pointwise, define


@triton.jit
def forward(gate, up, PRECISE: tl.constexpr):
    return gate * normal_cdf(gate, PRECISE) * up


@triton.jit
def backward(gate, up, dy, PRECISE: tl.constexpr):
    phi = normal_cdf(gate, PRECISE)
    return dy * up * gelu_slope(gate, phi, PRECISE), dy * gate * phi


@triton.jit
def forward_tanh(gate, up, PRECISE: tl.constexpr):
    return gate / (1.0 + exp(-tanh_argument(gate), PRECISE)) * up


@triton.jit
def backward_tanh(gate, up, dy, PRECISE: tl.constexpr):
    phi, rest = tanh_cdf(gate, PRECISE)
    return dy * up * tanh_gelu_slope(gate, phi, rest), dy * gate * phi


@triton.jit
def again(gate, up, dy, PRECISE: tl.constexpr):
    dgate, dup = backward(gate, up, dy, PRECISE)
    return dgate, dup, forward(gate, up, PRECISE)


@triton.jit
def again_tanh(gate, up, dy, PRECISE: tl.constexpr):
    dgate, dup = backward_tanh(gate, up, dy, PRECISE)
    return dgate, dup, forward_tanh(gate, up, PRECISE)


def reference(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    wide = gate if gate.itemsize > 2 else gate.float()
    return (gelu_reference(wide, approximate) * up).to(gate.dtype)


def backward_scale(arguments: dict[str, Tensor], gradients: list[Tensor]) -> list[Tensor]:
    value, slope = terms(arguments["gate"])
    return [(gradients[0] * arguments["up"]).abs() * slope, gradients[0].abs() * value]


def torch_geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def liger(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    if approximate != "tanh":
        raise Declined("Liger's geglu takes the tanh form")
    return LigerGELUMulFunction.apply(gate, up)


FORMULAS = {"none": (forward, backward, again), "tanh": (forward_tanh, backward_tanh, again_tanh)}
call = Pointwise("geglu", ("gate", "up"), FORMULAS, reference, option="approximate", heavy=True)

WRONG = [
    Mutant("gate and up exchanged", lambda gate, up, approximate="none": reference(up, gate, approximate)),
    Mutant("of the other form", lambda gate, up, approximate="none": reference(gate, up, "tanh")),
]
# extremes: of large ones gate · up overflows before Φ' can bring PyTorch's gradient to 0
# ulps: x, erf, two sums and a product: four roundings
geglu = Operator(**define(
    call, flops=13, special_ops=2, backward_reads=3, extremes=("nonfinite", "tiny"), tuned=True, ulps=2.0,
    backward_scale=backward_scale, wrong=WRONG,
))  # fmt: skip
call.implement(geglu, torch_geglu)
geglu.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)


@geglu.function
def geglu_function(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Gated linear unit with gelu. Of one packed tensor: ``geglu(*x.chunk(2, -1))``, which copies nothing.

    Args:
        gate: any shape; float32, float16 or bfloat16.
        up: the same shape, dtype and device.
        approximate: ``none`` for gate Φ(gate); ``tanh`` for its tanh form.

    Returns:
        ``gelu(gate) * up``, computed in fp32 and rounded once.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: shapes or devices that differ, or another ``approximate``.
    """
    return call(gate, up, choice=approximate)
