"""The calls of a linear layer: its launches by Triton and by Hopper's main loop, and autograd in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.operators.call import KernelFunction, reference_gradients
from weft.operators.elementwise.dispatch import map_plan
from weft.operators.hopper import gemm
from weft.operators.hopper.gemm import SIXTEEN_BITS, HopperPlan
from weft.operators.hopper.tensor_maps import why_not as map_why_not
from weft.operators.launch import Plan, Plans
from weft.operators.linear import linear_activations, linear_kernels
from weft.operators.linear.linear_activations import halves
from weft.operators.linear.linear_definition import reference
from weft.operators.matmul import kernels
from weft.operators.matmul.matmul import default_precision
from weft.operators.reduction.sum import sum as column_sum

# All tensors here are matrices (and a vector, the bias): x [M, K], weight [N or 2N, K], residual and y [M, N].
Forward = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, str | None, bool], tuple[Tensor, Tensor]]


def empty_result(x: Tensor, weight: Tensor, activation: str | None) -> Tensor:
    n = weight.shape[0] // (2 if linear_activations.of(activation).gated else 1)
    return torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)


# ---- Triton ----------------------------------------------------------------------------------------------------------


def by_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """y, and what the activation was given, where that is to be kept."""
    y = empty_result(x, weight, activation)
    pre = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device) if keep else y
    if y.numel():
        call = (x, weight, x if bias is None else bias, x if residual is None else residual)
        options = (activation, bias is not None, residual is not None, keep, default_precision())
        linear_kernels.plans.of(call, *options)(*call, y, pre)
    return y, pre


def product_by_triton(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        kernels.plans.of((a, b), default_precision())(a, b, c)
    return c


# ---- Hopper's main loop ----------------------------------------------------------------------------------------------


def hopper_declines(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out: torch.dtype | None = None,
) -> str:
    """Why Hopper's main loop does not take a call (an empty string when it does); ``out`` is of y, x's when None."""
    if x.dtype not in SIXTEEN_BITS:
        return f"{x.dtype}: Hopper's main loop takes 16-bit floats here"
    for half in weight.chunk(2) if linear_activations.of(activation).gated else (weight,):
        if reason := gemm.why_not(x, half.t(), out or x.dtype):
            return reason
    if bias is not None and not bias.is_contiguous():
        return "a bias with gaps"
    return "" if residual is None else map_why_not("residual", residual, residual.element_size(), False)


class HopperLaunch:
    """The launch of ``(x, weight, bias, residual, y)``; any tensor stands in for what there is not."""

    def __init__(self, x: Tensor, weight: Tensor, residual: Tensor, activation: str | None, biased: bool, added: bool):
        chosen = linear_activations.of(activation)
        self.gated, self.biased, self.added = chosen.gated, biased, added
        gate, up = self.halves(weight)
        self.plan = HopperPlan(
            x,
            gate.t(),
            biased=biased,
            activation=chosen.on_hopper,
            residual=residual if added else None,
            up=up.t() if chosen.gated else None,
        )

    def halves(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        if not self.gated:
            return weight, weight
        n = weight.shape[0] // 2
        return weight[:n], weight[n:]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, y: Tensor) -> None:
        gate, up = self.halves(weight)
        self.plan(
            x,
            gate,  # the plan reads addresses alone
            y,
            bias=bias if self.biased else None,
            residual=residual if self.added else None,
            up=up if self.gated else None,
        )


hopper_plans = Plans(HopperLaunch)


def launch_on_hopper(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, y: Tensor
) -> None:
    call = (x, weight, x if residual is None else residual)
    ready = hopper_plans.of(call, activation, bias is not None, residual is not None)
    ready(x, weight, x if bias is None else bias, call[2], y)


def by_hopper(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, keep: bool
) -> tuple[Tensor, Tensor]:
    """As :func:`by_triton`. What is to be kept is a product of its own, from which an element-wise kernel makes y."""
    y = empty_result(x, weight, activation)
    pre = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device) if keep else y
    if not y.numel():
        return y, pre
    if not keep:
        launch_on_hopper(x, weight, bias, residual, activation, y)
        return y, y
    launch_on_hopper(x, weight, bias, None, None, pre)
    chosen = linear_activations.of(activation)
    of = halves(pre, chosen)
    maps.of((*of, y), chosen.forward, len(of), chosen.heavy)(*of, y)
    return y if residual is None else y.add_(residual), pre


def product_by_hopper(a: Tensor, b: Tensor) -> Tensor:
    """cuBLAS's where TMA does not take the layout: a gradient that is expanded, say."""
    if gemm.why_not(a, b, a.dtype):
        return torch.mm(a, b)
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    if c.numel():
        gemm.plans.of((a, b))(a, b, c)
    return c


# ---- gradients -------------------------------------------------------------------------------------------------------


def _map(*call: Any) -> Plan:
    *tensors, formula, inputs, heavy = call
    return map_plan(formula, tuple(tensors[:inputs]), tuple(tensors[inputs:]), heavy)


maps = Plans(_map)


def slope(kept: Tensor, dy: Tensor, activation: str) -> Tensor:
    """The gradient of what an activation was given: one pass over it and dy."""
    chosen = linear_activations.of(activation)
    made = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
    call = (*halves(kept, chosen), dy)
    if made.numel():
        tensors = (*call, *halves(made, chosen))
        maps.of(tensors, chosen.backward, len(call), chosen.heavy)(*tensors)
    return made


class Way(NamedTuple):
    """How a call and the products of its gradient are computed."""

    forward: Forward
    product: Callable[[Tensor, Tensor], Tensor]


TRITON = Way(by_triton, product_by_triton)
HOPPER = Way(by_hopper, product_by_hopper)


class Linear(KernelFunction):
    """In eager mode. Where a gradient is wanted, what the activation was given is kept; of relu without a residual the result
    says enough."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str | None,
        way: Way,
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad[:3])
        keep = wanted and activation is not None and not (activation == "relu" and residual is None)
        y, kept = way.forward(x, weight, bias, residual, activation, keep)
        if wanted:
            ctx.save_for_backward(x, weight, bias, None if activation is None else kept)
        ctx.activation, ctx.way = activation, way
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias, of_residual = ctx.needs_input_grad[:4]
        dresidual = dy if of_residual else None
        if not (of_x or of_weight or of_bias):
            return None, None, None, dresidual, None, None
        x, weight, bias, kept = ctx.saved_tensors
        if torch.is_grad_enabled():

            def without_residual(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return reference(x, weight, bias, activation=ctx.activation)

            wanted = (of_x, of_weight, of_bias)
            found = reference_gradients(without_residual, (x, weight, bias), wanted, (dy,))
            return (*found, dresidual, None, None)
        dpre = dy if ctx.activation is None else slope(kept, dy, ctx.activation)
        product = ctx.way.product
        dx = product(dpre, weight) if of_x else None
        dweight = None
        if of_weight and weight.stride(0) == 1 and weight.stride(1) != 1:  # stored [K, N]: so is its gradient
            dweight = product(x.t(), dpre).t()
        elif of_weight:
            dweight = product(dpre.t(), x)
        dbias = column_sum.public(dpre, 0).to(dy.dtype) if of_bias and column_sum.public is not None else None
        return dx, dweight, dbias, dresidual, None, None
