"""``RMSNorm`` and ``LayerNorm``: PyTorch's modules over weft's operators."""

import torch
from torch import Tensor

from weft import ops


class RMSNorm(torch.nn.RMSNorm):
    """As ``torch.nn.RMSNorm``: arguments, ``state_dict``, results and gradients; computed in fp32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows(self, x, self.normalized_shape)
        weight = None if self.weight is None else self.weight.flatten()
        y: Tensor = ops.rms_norm(rows, weight, self.eps)
        return y.view(x.shape)


class LayerNorm(torch.nn.LayerNorm):
    """As ``torch.nn.LayerNorm``: arguments, ``state_dict``, results and gradients; computed in fp32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows(self, x, self.normalized_shape)
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        y: Tensor = ops.layer_norm(rows, weight, bias, self.eps)
        return y.view(x.shape)


def _rows(module: torch.nn.Module, x: Tensor, normalized: tuple[int, ...]) -> Tensor:
    """x with its normalised dimensions as one."""
    if tuple(x.shape[-len(normalized) :]) != tuple(normalized):
        raise ValueError(
            f"{type(module).__name__}: argument 'x' has shape {tuple(x.shape)}; expected one that ends in {tuple(normalized)}"
        )
    return x if len(normalized) == 1 else x.flatten(-len(normalized))
