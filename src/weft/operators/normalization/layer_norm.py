"""``layer_norm(x, weight, bias, eps)``: (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

Forward compulsorily reads x and writes y; backward reads x and dy and writes dx (weight, bias and their gradients are a row
each). Source: Ba, Kiros & Hinton 2016 (arXiv 1607.06450).
"""

import torch.nn.functional as F
from torch import Tensor

from weft.definition import Operator
from weft.operators.call import widened
from weft.operators.normalization.dispatch import Norm
from weft.operators.normalization.reference import define

EPS = 1e-5


def torch_layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def liger(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


norm = Norm("layer_norm", torch_layer_norm, centered=True)
layer_norm = Operator(**define(norm, EPS))

norm.register(layer_norm)
layer_norm.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)


@layer_norm.function
def layer_norm_function(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> Tensor:
    """Layer normalisation over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Args:
        x: [..., N]; float32, float16, bfloat16 or float64.
        weight: [N], of x's dtype or float32; None for none. One of several dimensions is as of ``rms_norm``.
        bias: of the weight's shape and dtype; None for none.
        eps: added to the variance (of N terms, not N - 1).

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once. Under autocast the input is cast to float32, as
        ``torch.nn.functional.layer_norm`` does.

    Raises:
        TypeError: not tensors of those dtypes, or a bias without a weight.
        ValueError: a weight or bias of another shape or device, a scalar x, a negative eps.

    Backward saves x, the weight and two numbers a row; the gradients of weight and bias are summed in fp32 in a fixed order, so
    they are deterministic.
    """
    x, weight, bias = widened(x, weight, bias)
    return norm(x, None, weight, bias, eps)
