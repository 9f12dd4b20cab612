"""``add_rms_norm(x, residual, weight, eps)``: h = x + residual and its RMSNorm, in one pass.

The two together read 2 tensors and write 2; apart they would move 5. h is what the next block adds to (the prenorm output).
"""

import torch.nn.functional as F
from torch import Tensor

from weft.definition import Declined, Operator
from weft.operators.normalization import rms_norm
from weft.operators.normalization.dispatch import Norm
from weft.operators.normalization.reference import define

EPS = 1e-6


def in_torch(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = EPS) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, eps), h


def liger(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = EPS) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    if weight is None:
        raise Declined("Liger's fused_add_rms_norm wants a weight")
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "llama", False)


def quack(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = EPS) -> tuple[Tensor, Tensor]:
    from quack.rmsnorm import rmsnorm

    if x.ndim != 2:
        raise Declined("QuACK's rmsnorm takes a matrix")
    y, h = rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)
    return y, h


norm = Norm("add_rms_norm", in_torch, centered=False, alone=rms_norm.norm)
add_rms_norm = Operator(**define(norm, EPS))

norm.register(add_rms_norm)
add_rms_norm.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)
add_rms_norm.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)


@add_rms_norm.function
def add_rms_norm_function(
    x: Tensor, residual: Tensor | None, weight: Tensor | None = None, eps: float | None = EPS
) -> tuple[Tensor, Tensor]:
    """Residual addition and RMSNorm of the sum over the last dimension, in one pass.

    Args:
        x, weight, eps: as of ``rms_norm``.
        residual: of x's shape and device. Of another dtype than x (fp32 beside bf16 under autocast), both are cast to the one
            of ``x + residual``, and a narrower weight with them. None where nothing is added: h is x itself, and what comes
            back by it is added in the pass that makes the norm's gradient.

    Returns:
        ``(y, h)``: h = x + residual, in its dtype; y = ``h / sqrt(mean(h²) + eps) * weight`` in that dtype, computed in fp32
        from the rounded h and rounded once.

    Raises:
        TypeError: not tensors of those dtypes.
        ValueError: shapes or devices that do not match, a scalar x, a negative eps.

    Backward takes the gradients of both results and gives x and the residual the same one.
    """
    return norm(x, residual, weight, None, eps)
