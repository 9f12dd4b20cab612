"""AdamW with moments of 8 bits as bitsandbytes and torchao have it: their optimizers, over the same weights and the same codes
(both count the values of the dynamic map from the least, as we do)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.definition import Declined
from weft.operators.optimizer.blockwise import dequantize, quantize

Tensors = Sequence[Tensor]
Moment = tuple[Tensor, Tensor]  # codes and scales


class Peer:
    """A peer's optimizer for the weights of a call: made at the first, kept as long as those weights. The first call is for
    verification too: it gives the peer our counts and moments, and takes over what the peer keeps otherwise.

    Args:
        make: ``(parameters, options) -> optimizer``; imports the peer.
        adopt: ``(optimizer, parameter, step, first, second) -> the peer's own moments``, where those are not codes.
    """

    def __init__(self, make: Callable[..., Any], adopt: Callable[..., tuple[Tensor, Tensor] | None]):
        self.make, self.adopt = make, adopt
        self.known = WeakIdKeyDictionary()

    def __call__(
        self,
        params: Tensors,
        grads: Tensors,
        exp_avg_codes: Tensors,
        exp_avg_scales: Tensors,
        exp_avg_sq_codes: Tensors,
        exp_avg_sq_scales: Tensors,
        steps: Tensors,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool,
        block_size: int,
        state_format: str,
        seed: int | None,
    ) -> None:
        if maximize or state_format != "dynamic" or seed is not None:
            raise Declined("minimises, by the dynamic map, without random numbers")
        if params[0] in self.known:
            optimizer, held = self.known[params[0]]
            for p, g in zip(held, grads, strict=True):
                p.grad = g
            optimizer.step()
            return
        held = [torch.nn.Parameter(p.detach()) for p in params]
        optimizer = self.make(held, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, block_size)
        moments = zip(exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales, strict=True)
        wide = []
        for p, g, step, (m, m_scales, v, v_scales) in zip(held, grads, steps, moments, strict=True):
            p.grad = g
            both = (m, m_scales), (v, v_scales)
            kept = self.adopt(optimizer, p, step, *both)
            if kept is not None:
                for own, (codes, scales), signed in zip(kept, both, (True, False), strict=True):
                    own.copy_(dequantize(codes, scales, block_size, signed, "dynamic"))
                wide.append((kept, both))
        optimizer.step()
        for kept, both in wide:
            for own, (codes, scales), signed in zip(kept, both, (True, False), strict=True):
                quantize(own.float(), codes, scales, block_size, signed, "dynamic")
        for step in steps:
            step.add_(1)
        self.known[params[0]] = optimizer, held


def make_bitsandbytes(params: list[torch.nn.Parameter], options: dict[str, Any], block: int) -> Any:
    if block != 256:
        raise Declined("bitsandbytes has blocks of 256")
    return importlib.import_module("bitsandbytes.optim").AdamW8bit(params, **options, min_8bit_size=1)


def adopt_bitsandbytes(
    optimizer: Any, p: Tensor, step: Tensor, first: Moment, second: Moment
) -> tuple[Tensor, Tensor] | None:
    index = next(i for i, q in enumerate(optimizer.param_groups[0]["params"]) if q is p)
    optimizer.init_state(optimizer.param_groups[0], p, 0, index)
    optimizer.initialized = True
    state = optimizer.state[p]
    state["step"] = int(step)
    if state["state1"].dtype != torch.uint8:
        return state["state1"], state["state2"]
    state["state1"], state["absmax1"] = first
    state["state2"], state["absmax2"] = second
    return None


def make_torchao(params: list[torch.nn.Parameter], options: dict[str, Any], block: int) -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit(params, **options, block_size=block)


def adopt_torchao(
    optimizer: Any, p: Tensor, step: Tensor, first: Moment, second: Moment
) -> tuple[Tensor, Tensor] | None:
    made = [optimizer._new_buffer(p, signed) for signed in (True, False)]
    optimizer.state[p].update(step=step.cpu().clone(), exp_avg=made[0], exp_avg_sq=made[1])
    if not hasattr(made[0], "codes"):
        return made[0], made[1]
    for kept, (codes, scales) in zip(made, (first, second), strict=True):
        kept.codes, kept.scale = codes, scales
    return None


with_bitsandbytes = Peer(make_bitsandbytes, adopt_bitsandbytes)
with_torchao = Peer(make_torchao, adopt_torchao)
