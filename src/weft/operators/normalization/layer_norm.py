"""``layer_norm(x, weight, bias, eps)``: (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

Forward compulsorily reads x and writes y; backward reads x and dy and writes dx (weight, bias and their gradients are a row
each). Source: Ba, Kiros & Hinton 2016 (arXiv 1607.06450).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from weft.definition import Operator
from weft.operators import peers
from weft.operators.call import Choice, guarded, widened
from weft.operators.normalization.definition import define, normalised
from weft.operators.normalization.norm import Norm

EPS = 1e-5


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
    return normalised(x, weight, bias, eps, centered=True)


def torch_layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


norm = Norm(
    "layer_norm",
    centered=True,
    added=False,
    reference=lambda x, residual, weight, bias, eps: reference(x, weight, bias, eps),
)


def layer_norm_triton(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
    y: Tensor = norm.run("triton", x, None, weight, bias, eps)
    return y


def layer_norm_cuda(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
    y: Tensor = norm.run("cuda", x, None, weight, bias, eps)
    return y


def layer_norm_cuda_stream(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    y: Tensor = norm.run("cuda-stream", x, None, weight, bias, eps)
    return y


def liger(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    y: Tensor = LigerLayerNormFunction.apply(x, weight, bias, eps)
    return y


layer_norm = Operator(**define("layer_norm", reference, EPS, centered=True, added=False))

layer_norm.implementation("triton", arch=">=sm_80")(layer_norm_triton)
layer_norm.implementation("cuda", arch=">=sm_90", devices=("cuda",))(layer_norm_cuda)
layer_norm.implementation("cuda-stream", backend="cuda", arch=">=sm_90", devices=("cuda",), directions=("backward",))(
    layer_norm_cuda_stream
)
layer_norm.implementation("torch")(torch_layer_norm)
layer_norm.implementation("torch.compile", devices=("cuda",))(peers.Compiled(torch_layer_norm))
layer_norm.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)


@layer_norm.choice
@guarded
def choose(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Choice:
    return norm.choose(x, None, weight, bias, eps)


@layer_norm.function
def layer_norm_function(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """Layer normalisation over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Args:
        x: [..., N]; float32, float16 or bfloat16.
        weight: [N], of x's dtype or float32; None for none.
        bias: [N], of the weight's dtype; None for none.
        eps: added to the variance (of N terms, not N - 1).

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once. Under autocast the input is cast to float32, as
        ``torch.nn.functional.layer_norm`` does.

    Raises:
        TypeError: not tensors of those dtypes, or a bias without a weight.
        ValueError: a weight or bias of another length or device, a scalar x, a negative eps.

    Backward saves x, the weight and two numbers a row; the gradients of weight and bias are summed in fp32 in a fixed order, so
    they are deterministic.
    """
    x, weight, bias = widened(x, weight, bias)
    y: Tensor = norm(x, None, weight, bias, eps)
    return y
