"""Clipping and unscaling for what the engine's one norm does not cover: several devices, parameters that PyTorch steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.operators.optimizer import kernels

if TYPE_CHECKING:
    from weft.optim.optimizer import OneLaunch


def measure(
    optimizer: OneLaunch, plain: list[tuple[int, Tensor]], scale: Tensor | None, found: Tensor | None
) -> Tensor | None:
    """Writes norm and factor for every device, by PyTorch's functions. Returns the flag that skips the step, if one may."""
    params = [p for part in optimizer._parts for p in part.params] + [p for _, p in plain]
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return found
    norm = torch.nn.utils.get_total_norm([g.float() if g.itemsize < 4 else g for g in grads]).float()
    if scale is not None:
        norm = norm / scale.to(norm.device).view(())
    limit = torch.inf if optimizer.max_norm is None else optimizer.max_norm
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    flag = (~norm.isfinite()).float()
    if found is not None:
        flag = torch.maximum(flag, found.to(norm.device).view(()))
    for device in {p.device for p in params}:
        control = optimizer._control(device)
        control[kernels.FACTOR.value], control[kernels.NORM.value] = factor, norm
    return flag if optimizer.skip_nonfinite or found is not None else None


def ready(p: Tensor, optimizer: OneLaunch, scale: Tensor | None, factor: Tensor | None) -> Tensor:
    """A parameter's gradient, unscaled and clipped."""
    grad = p.grad
    assert grad is not None  # the caller looked
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"{type(optimizer).__name__} does not support sparse gradients; torch.optim.SparseAdam and "
            "torch.optim.SGD take them"
        )
    if scale is not None:
        grad = grad / scale.to(grad.device).view(())
    return grad if factor is None else grad * factor.to(grad.dtype)
