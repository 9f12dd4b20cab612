"""``add_layer_norm(x, residual, weight, bias, eps)``: h = x + residual and its LayerNorm, in one pass.

The two together read 2 tensors and write 2; apart they would move 5. h is what the next block adds to (the prenorm output).
"""

import torch.nn.functional as F
from torch import Tensor

from weft.definition import Operator
from weft.operators.call import widened
from weft.operators.normalization import layer_norm
from weft.operators.normalization.dispatch import Norm
from weft.operators.normalization.reference import define

EPS = 1e-5


def in_torch(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.layer_norm(h, (h.shape[-1],), weight, bias, eps), h


norm = Norm("add_layer_norm", in_torch, centered=True, alone=layer_norm.norm)
add_layer_norm = Operator(**define(norm, EPS))

norm.register(add_layer_norm)


@add_layer_norm.function
def add_layer_norm_function(
    x: Tensor, residual: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    """Residual addition and LayerNorm of the sum over the last dimension, in one pass.

    Args:
        x, weight, bias, eps: as of ``layer_norm``.
        residual: as of ``add_rms_norm``.

    Returns:
        ``(y, h)``: h = x + residual, in its dtype; y = ``(h - mean) / sqrt(variance + eps) * weight + bias`` in that
        dtype, computed in fp32 from the rounded h and rounded once.

    Raises:
        TypeError, ValueError: as ``layer_norm`` and ``add_rms_norm``.

    Backward takes the gradients of both results and gives x and the residual the same one.
    """
    if isinstance(x, Tensor) and widened(x)[0] is not x:  # autocast: h keeps its dtype, the norm is computed in float32
        norm.choose(x, residual, weight, bias, eps)  # raises what is wrong with them
        h = x if residual is None else x + residual
        return layer_norm.layer_norm_function(h, weight, bias, eps), h
    return norm(x, residual, weight, bias, eps)
