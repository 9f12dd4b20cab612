"""What routing returns, and routing in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """What ``route_top_k`` returns. T tokens, E experts, k of them for each token."""

    weights: Tensor  # [T, k]
    experts: Tensor  # [T, k] int32
    offsets: Tensor  # [E + 1] int32: expert e has the places offsets[e] … offsets[e + 1] - 1
    source: Tensor  # [T·k] int32: the token at each place
    position: Tensor  # [T, k] int32: the place of each (token, slot) pair


def reference(
    logits: Tensor, k: int, *, normalise: bool = True, scoring: str = "softmax", bias: Tensor | None = None
) -> Routing:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    value = wide if bias is None else scores + bias.to(wide.dtype)
    experts = torch.sort(value.detach(), dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(weights.to(logits.dtype), experts.int(), *ordered(experts, logits.shape[1]))


def ordered(experts: Tensor, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(offsets, source, position)`` of experts [T, k], by a stable sort."""
    by_expert, order = torch.sort(experts.reshape(-1), stable=True)
    offsets = torch.searchsorted(by_expert, torch.arange(e + 1, device=experts.device, dtype=experts.dtype))
    places = torch.arange(order.numel(), device=experts.device, dtype=torch.int32)
    position = torch.empty_like(places).scatter(0, order, places).view(experts.shape)
    return offsets.int(), (order // max(experts.shape[1], 1)).int(), position
