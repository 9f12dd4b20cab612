"""A mixture-of-experts layer whose experts are spread over ranks; for inference, since nothing here has a gradient."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import ops
from weft.comm.symmetric.expert_all_to_all import ExpertAllToAll, Received
from weft.operators.mixture_of_experts.reference import ordered


def expert_feed_forward(
    exchange: ExpertAllToAll, x: Tensor, router: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    """``weft.ops.moe_feed_forward`` of this rank's tokens through all ranks' experts.

    Args:
        x: [T, D], this rank's.
        router: [E, D], the same on all ranks.
        w_gate_up, w_down: [E / ranks, 2H, D] and [E / ranks, D, H], this rank's experts.

    Returns:
        [T, D].
    """
    logits = F.linear(x, router).float()
    routing = ops.route_top_k(logits, exchange.form.k)
    return exchange.combine(of_received(exchange.dispatch(x, routing.experts, routing.weights), w_gate_up, w_down))


def of_received(received: Received, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """[R, D]: what this rank's experts make of the rows, weighted. Rows for no expert come last, where no group is."""
    each = len(w_gate_up)
    experts = torch.where(received.experts < 0, each, received.experts)
    offsets, source, position = ordered(experts, each + 1)
    offsets = offsets[:-1]
    hidden = ops.grouped_matmul(
        received.rows, w_gate_up, offsets, source=source, position=position, activation="swiglu"
    )
    return ops.combine_tokens(ops.grouped_matmul(hidden, w_down, offsets), position, received.weights)
