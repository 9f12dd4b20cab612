"""The activations of ``linear``: those of the element-wise operators, by the names that a layer's user writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.elementwise import geglu, gelu, reglu, silu, swiglu
from weft.operators.elementwise.kernels import relu


@triton.jit
def itself(x, PRECISE: tl.constexpr):
    return x


@triton.jit
def relu_backward(y, dy, PRECISE: tl.constexpr):
    """Of the result as of what it was made from: their signs agree."""
    return tl.where(y <= 0, 0.0, dy)


class Activation(NamedTuple):
    """An activation.

    Args:
        gated: whether it takes two halves, gate and up: act(gate) · up.
        on_hopper: what the main loop's epilogue calls it (of a gate, what is done to it).
        forward, backward: Triton formulas, as of :class:`weft.operators.elementwise.dispatch.Formula`.
        heavy: whether its arithmetic takes about as long as its bytes.
        reference: of one tensor, or of gate and up.
        usual: what a user writes in PyTorch, where that is something else.
    """

    gated: bool
    on_hopper: str
    forward: Any
    backward: Any
    heavy: bool
    reference: Callable[..., Tensor]
    usual: Callable[..., Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return geglu.reference(gate, up, "tanh")


def _usual_geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return geglu.torch_geglu(gate, up, "tanh")


def _itself(x: Tensor) -> Tensor:
    return x


NONE = Activation(False, "NONE", itself, None, False, _itself, _itself)
ACTIVATIONS = {
    "relu": Activation(False, "RELU", relu, relu_backward, False, torch.relu, torch.relu),
    "silu": Activation(False, "SILU_FAST", silu.forward, silu.backward, False, F.silu, F.silu),
    "gelu": Activation(False, "GELU", gelu.forward, gelu.backward, True, gelu.reference, F.gelu),
    "gelu_tanh": Activation(False, "GELU_TANH", gelu.forward_tanh, gelu.backward_tanh, True, _gelu_tanh, _gelu_tanh),
    "reglu": Activation(True, "RELU", reglu.forward, reglu.backward, False, reglu.reference, reglu.reference),
    "swiglu": Activation(
        True, "SILU_FAST", swiglu.forward, swiglu.backward, False, swiglu.reference, swiglu.torch_swiglu
    ),
    "geglu": Activation(True, "GELU", geglu.forward, geglu.backward, True, geglu.reference, geglu.torch_geglu),
    "geglu_tanh": Activation(
        True, "GELU_TANH", geglu.forward_tanh, geglu.backward_tanh, True, _geglu_tanh, _usual_geglu_tanh
    ),
}


def of(name: str | None) -> Activation:
    return NONE if name is None else ACTIVATIONS[name]


def halves(pre: Tensor, chosen: Activation) -> tuple[Tensor, ...]:
    """[..., 2N] as gate and up, or [..., N] itself."""
    return pre.chunk(2, -1) if chosen.gated else (pre,)
