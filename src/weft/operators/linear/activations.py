"""The activations of ``linear``: those of the element-wise operators, by the names that a layer's user writes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.elementwise import geglu, gelu, reglu, silu, swiglu
from weft.operators.elementwise.kernels import relu
from weft.operators.elementwise.pointwise import Pointwise


@triton.jit
def itself(x, PRECISE: tl.constexpr):
    return x


@triton.jit
def relu_backward(y, dy, PRECISE: tl.constexpr):
    """Of the result as of what it was made from: their signs agree."""
    return tl.where(y <= 0, 0.0, dy)


class Activation(NamedTuple):
    """An activation."""

    gated: bool  # whether it takes two halves, gate and up: act(gate) · up
    on_hopper: str  # what the main loop's epilogue calls it (of a gate, what is done to it)
    forward: Any  # Triton formulas, as of weft.operators.elementwise.dispatch.Formula
    backward: Any
    heavy: bool  # whether its arithmetic takes about as long as its bytes
    reference: Callable[..., Tensor]  # of one tensor, or of gate and up
    usual: Callable[..., Tensor]  # what a user writes in PyTorch, where that is something else


def _itself(x: Tensor) -> Tensor:
    return x


def _from(call: Pointwise, on_hopper: str, usual: Callable[..., Tensor], form: str = "") -> Activation:
    """That of an element-wise operator, of the ``form`` that its option has."""
    f, how = call.formulas[form], {call.option: form} if form else {}
    gated, usual = len(call.arguments) == 2, functools.partial(usual, **how)
    return Activation(gated, on_hopper, f.forward, f.backward, f.heavy, f.reference, usual)


NONE = Activation(False, "NONE", itself, None, False, _itself, _itself)
ACTIVATIONS = {
    "relu": Activation(False, "RELU", relu, relu_backward, False, torch.relu, torch.relu),
    "silu": _from(silu.call, "SILU_FAST", F.silu),
    "gelu": _from(gelu.call, "GELU", F.gelu, "none"),
    "gelu_tanh": _from(gelu.call, "GELU_TANH", F.gelu, "tanh"),
    "reglu": _from(reglu.call, "RELU", reglu.reference),
    "swiglu": _from(swiglu.call, "SILU_FAST", swiglu.torch_swiglu),
    "geglu": _from(geglu.call, "GELU", geglu.torch_geglu, "none"),
    "geglu_tanh": _from(geglu.call, "GELU_TANH", geglu.torch_geglu, "tanh"),
}


def of(name: str | None) -> Activation:
    return NONE if name is None else ACTIVATIONS[name]


def halves(pre: Tensor, chosen: Activation) -> tuple[Tensor, ...]:
    """[..., 2N] as gate and up, or [..., N] itself."""
    return pre.chunk(2, -1) if chosen.gated else (pre,)
