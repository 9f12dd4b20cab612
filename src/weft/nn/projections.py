"""Linear layers with what lies around them, for training: several of one input, and one behind a gated activation.

Autograd makes the gradient of an input of three layers as three products and two sums of [T, K], and keeps the activation
[T, H] that the last layer of a feed-forward reads. Here products add to what is there already, and the activation is computed
again in the pass that makes its gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import module as hooks_of_all

from weft.nn.linear import Linear
from weft.operators.autograd import KernelFunction, reference_gradients
from weft.operators.call import traced
from weft.operators.elementwise import geglu, swiglu
from weft.operators.elementwise.pointwise import Pointwise
from weft.operators.launch import PLAIN

# T tokens, N outputs, K inputs, H hidden width
Gated = tuple[Pointwise, str | None]  # a gated activation and its form

SWIGLU: Gated = swiglu.call, None
GEGLU: Gated = geglu.call, "none"
GEGLU_TANH: Gated = geglu.call, "tanh"


def projected(x: Tensor, *layers: Any) -> tuple[Tensor, ...]:
    """Each layer's result for x [..., K]."""
    if not projected_at_once(x, *layers):
        return tuple(layer(x) for layer in layers)
    made: tuple[Tensor, ...] = _Projections.apply(x, *_parameters(layers))
    return made


def gated_projection(halves: tuple[Tensor, ...], layer: Any, gated: Gated) -> Tensor:
    """``layer(activation(gate) * up)`` of (gate, up), [..., H] each."""
    gate, up = halves
    call, form = gated
    if not projected_at_once(gate, layer) or gate.dtype != up.dtype or not up.requires_grad:
        y: Tensor = layer(call(gate, up, choice=form))
    else:
        y = _GatedProjection.apply(gate, up, *_parameters((layer,)), gated)
    return y


def _parameters(layers: tuple[Any, ...]) -> Iterator[Tensor | None]:
    for layer in layers:
        yield from (layer.weight, layer.bias)


def projected_at_once(x: Tensor, *layers: Any) -> bool:
    """Whether a gradient of x is wanted and calling the layers does nothing but multiply: no adapter, hook, shard, compiler or
    autocast has a say."""
    if (
        not (torch.is_grad_enabled() and x.requires_grad and x.ndim > 1)
        or traced(x)
        or hooks_of_all._has_any_global_hook()
    ):
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    return all(map(_plain, layers)) and all(layer.weight.dtype == x.dtype for layer in layers)


def hooked(module: torch.nn.Module) -> bool:
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, name) for name in hooks)


def _plain(layer: Any) -> bool:
    known = type(layer) is torch.nn.Linear or (type(layer) is Linear and not layer.fp8)
    if not known or "forward" in vars(layer) or hooked(layer):
        return False
    return all(t is None or t.__class__ in PLAIN for t in (layer.weight, layer.bias))


def _gradient_of_input(dy: Tensor, weight: Tensor, others: Tensor | None = None) -> Tensor:
    """dy · weight, [T, N] · [N, K], added in place to what ``others`` gave, unless a gradient of it is wanted."""
    if others is None:
        return dy @ weight
    return torch.addmm(others, dy, weight) if torch.is_grad_enabled() else others.addmm_(dy, weight)


def _gradients(dy: Tensor, x: Tensor, wanted: tuple[bool, ...]) -> list[Tensor | None]:
    """Of a layer's weight and bias, where they are wanted: dy [T, N], x [..., K]."""
    return [dy.t() @ x.flatten(0, -2) if wanted[0] else None, dy.sum(0) if wanted[1] else None]


class _Projections(KernelFunction):
    """``(x, weight, bias, weight, bias, …)``"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *parameters)
        ctx.set_materialize_grads(False)
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dx: Any = None
        found: list[Tensor | None] = []
        for i, dy in enumerate(gradients):
            if dy is None:
                found += [None, None]
                continue
            dy = dy.flatten(0, -2)
            if wanted[0]:
                dx = _gradient_of_input(dy, parameters[2 * i], dx)
            found += _gradients(dy, x, wanted[1 + 2 * i : 3 + 2 * i])
        return (None if dx is None else dx.view(x.shape), *found)


class _GatedProjection(KernelFunction):
    """``(gate, up, weight, bias, activation)``"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, gated: Gated) -> Tensor:
        ctx.save_for_backward(gate, up, weight, bias)
        ctx.gated = gated
        call, form = gated
        return F.linear(call(gate, up, choice=form), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gate, up, weight, bias = ctx.saved_tensors
        (call, form), wanted = ctx.gated, ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            formula = call.formula if form is None else call.of(form)
            inputs = gate, up, weight, *(() if bias is None else (bias,))
            found = reference_gradients(
                lambda g, u, *p: F.linear(formula.reference(g, u), *p), inputs, wanted[: len(inputs)], (dy,)
            )
            return (*found, *(None,) * (5 - len(found)))
        dgate, dup, a = call.again(gate, up, dy @ weight, form)
        return dgate, dup, *_gradients(dy.flatten(0, -2), a, wanted[2:]), None
