"""``rms_norm(x, weight, eps)``: x / sqrt(mean(x²) + eps) * weight over the last dimension, forward and backward.

Forward compulsorily reads x and writes y; backward reads x and dy and writes dx (weights and their gradient are a row
each). A few operations an element: memory bandwidth is the limit. Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.definition import Declined, Operator, workload
from weft.operators.call import on_gpu
from weft.operators.normalization.dispatch import BACKWARD, FORWARD, Norm, gradients, normalise
from weft.operators.normalization.reference import define

EPS = 1e-6


def torch_rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def liger(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def quack(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    from quack.rmsnorm import rmsnorm

    if x.ndim != 2:
        raise Declined("QuACK's rmsnorm takes a matrix")
    return rmsnorm(x, weight, eps=eps)


def numpy(x: Tensor, weight: Tensor | None = None, eps: float = EPS) -> Tensor:
    import numpy as np

    a = x.numpy()
    y = a / np.sqrt(np.mean(a * a, axis=-1, keepdims=True) + np.float32(eps))
    return torch.from_numpy(y if weight is None else y * weight.numpy())


LARGER_THAN_CACHES = [workload("fp32", M=2**13, N=2**12)]  # 128 MiB a tensor

norm = Norm("rms_norm", torch_rms_norm, centered=False)
rms_norm = Operator(**define(norm, EPS, cpu=LARGER_THAN_CACHES))

norm.register(rms_norm)
rms_norm.implementation("liger", requires="liger-kernel", devices=("cuda",))(liger)
rms_norm.implementation("quack", requires="quack-kernels", devices=("cuda",))(quack)
rms_norm.implementation("numpy", devices=("cpu",), directions=("forward",), dtypes=("fp32",))(numpy)


@rms_norm.function
def rms_norm_function(x: Tensor, weight: Tensor | None = None, eps: float | None = EPS) -> Tensor:
    """Root-mean-square normalisation over the last dimension: ``x / sqrt(mean(x²) + eps) * weight``.

    Args:
        x: [..., N]; float32, float16, bfloat16 or float64.
        weight: [N], of x's dtype or float32; None for none. One of several dimensions is of as many last ones of x, which the
            norm is over; they must lie side by side. Where a model stores w for 1 + w (Gemma), give ``1 + w.float()``.
        eps: added to the mean square; None as for ``torch.nn.functional.rms_norm``: the machine epsilon of float32 (of float64
            for float64), in which it is computed.

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once.

    Raises:
        TypeError: not tensors of those dtypes.
        ValueError: a weight of another shape or device, a scalar x, a negative eps, dimensions that do not flatten into a view.

    Backward saves x and the weight; the weight's gradient is summed in fp32 in a fixed order, so it is deterministic.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
    """
    return norm(x, None, weight, None, eps)


# ---- what torch.compile and torch.export see: torch.ops.weft.rms_norm ------------------------------------------------


@torch.library.triton_op("weft::rms_norm", mutates_args=())
def rms_norm_op(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if not on_gpu(x):
        return norm.reference(x, weight, eps)
    config = norm.configs[weight is not None, False]
    return normalise(FORWARD.kernel("triton"), (x, None, weight, None), eps, config, saved=False)[0]


@torch.library.triton_op("weft::rms_norm_backward", mutates_args=())
def backward_op(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(dx, dweight); dweight is empty without a weight."""
    if on_gpu(x):
        config = norm.configs[weight is not None, False]
        dx, dw, _ = gradients(BACKWARD.kernel("triton"), (x, dy, None, weight), (x, x), eps, config)
        return dx, x.new_empty(0) if dw is None else dw
    wide = x if x.dtype == torch.float64 else x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    xhat, g = wide * rstd, dy if weight is None else dy * weight
    dx = (rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))).to(x.dtype)
    return dx, x.new_empty(0) if weight is None else (dy * xhat).flatten(0, -2).sum(0).to(weight.dtype)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    dx, dw = torch.ops.weft.rms_norm_backward(dy, x, weight, ctx.eps)
    return dx, None if weight is None else dw, None


rms_norm_op.register_autograd(_backward, setup_context=_save)
