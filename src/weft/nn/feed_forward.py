"""The feed-forward layers of a decoder: ``SwiGLU`` and ``MixtureOfExperts``."""

import math
from typing import Any

import torch
from torch import Tensor

from weft import ops
from weft.nn.linear import Linear
from weft.nn.projections import SWIGLU, gated_projection, projected

# T tokens, D width, H hidden width, E experts


class SwiGLU(torch.nn.Module):
    """down_proj(silu(gate_proj(x)) · up_proj(x)) (Shazeer 2020, arXiv 2002.05202), named as in Hugging Face's Llama.

    Args:
        dim, hidden: D and H.
        bias: of the three projections.
        fp8: of the three projections, as for :class:`~weft.nn.Linear`.
        device, dtype: of the parameters.
    """

    def __init__(
        self, dim: int, hidden: int, bias: bool = False, *, fp8: bool = False, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        new: dict[str, Any] = {"device": device, "dtype": dtype, "fp8": fp8}
        self.gate_proj = Linear(dim, hidden, bias, **new)
        self.up_proj = Linear(dim, hidden, bias, **new)
        self.down_proj = Linear(hidden, dim, bias, **new)

    def forward(self, x: Tensor) -> Tensor:
        return gated_projection(projected(x, self.gate_proj, self.up_proj), self.down_proj, SWIGLU)


class MixtureOfExperts(torch.nn.Module):
    """Of E SwiGLU experts the k best for each token, weighted (``weft.ops.moe_feed_forward``); no token is dropped. Parameters
    are named as in Hugging Face's Qwen3-MoE and Mixtral: ``gate.weight`` [E, D], ``experts.gate_up_proj`` [E, 2H, D],
    ``experts.down_proj`` [E, D, H].

    Args:
        dim, hidden, experts, k: D, H, E, and the experts of a token.
        normalise, scoring: as for ``weft.ops.route_top_k``.
        device, dtype: of the parameters.

    Raises:
        ValueError: k not in 1 … E.
    """

    def __init__(
        self, dim: int, hidden: int, experts: int, k: int, *, normalise: bool = True, scoring: str = "softmax",
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 1 <= k <= experts:
            raise ValueError(f"MixtureOfExperts: argument 'k' is {k}; expected 1 … experts = {experts}")
        self.k, self.normalise, self.scoring = k, normalise, scoring
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = torch.nn.Linear(dim, experts, bias=False, **new)
        self.experts: Any = torch.nn.Module()
        for name, shape in (("gate_up_proj", (experts, 2 * hidden, dim)), ("down_proj", (experts, dim, hidden))):
            weight = torch.nn.Parameter(torch.empty(shape, **new))
            torch.nn.init.uniform_(weight, -1 / math.sqrt(shape[-1]), 1 / math.sqrt(shape[-1]))  # as torch.nn.Linear
            self.experts.register_parameter(name, weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> [..., D]."""
        y: Tensor = ops.moe_feed_forward(
            x.reshape(-1, x.shape[-1]), self.gate.weight, self.experts.gate_up_proj, self.experts.down_proj, self.k,
            normalise=self.normalise, scoring=self.scoring,
        )  # fmt: skip
        return y.view(x.shape)
