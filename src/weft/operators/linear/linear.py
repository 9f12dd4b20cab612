"""``linear(x, weight, bias, residual, activation=...)``: a linear layer with what follows it in one launch.

2·M·N·K operations, 4·M·N·K of a gated activation; bias, activation, gate and residual are done on the sums while they are in
registers, which saves a trip of [M, N] or [M, 2N] through memory for each (theory and measurements: README.md).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator, Tolerance
from weft.operators import peers
from weft.operators.call import (
    Choice,
    cast_for_products,
    check_same,
    check_tensor,
    differentiable,
    eager,
    guarded,
    on_gpu,
    rows_of,
    traced,
)
from weft.operators.launch import Plans, target_sm
from weft.operators.linear import linear_activations
from weft.operators.linear.linear_activations import ACTIVATIONS
from weft.operators.linear.linear_calls import HOPPER, TRITON, HopperLaunch, Linear, Way, hopper_declines
from weft.operators.linear.linear_definition import MUTANTS, OPTIONS, WORKLOADS, composed, cost, inputs, reference
from weft.operators.linear.linear_kernels import plan as triton_plan
from weft.operators.linear.linear_peers import cublaslt, quack
from weft.operators.linear.skinny_matmul import MOST_ROWS
from weft.operators.matmul.matmul import default_precision

LONGEST_K = 1024  # terms up to which an epilogue saves more than Triton's loop loses to cuBLAS's, counted (README.md)
COPY = "leading dimensions that do not collapse into rows of one stride, for which a copy would be needed"
NOT_HOPPER = "an architecture that Hopper's main loop is not for"

# ---- implementations -------------------------------------------------------------------------------------------------


def flat(t: Tensor) -> Tensor:
    """[..., K] as a matrix: a view."""
    return t if t.ndim == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def run(
    way: Way, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None
) -> Tensor:
    y: Tensor = differentiable(
        Linear, flat(x), weight, bias, None if residual is None else flat(residual), activation, way
    )
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


def declined(x: Tensor, residual: Tensor | None) -> str:
    return COPY if rows_of(x) is None or (residual is not None and rows_of(residual) is None) else ""


def linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    if reason := declined(x, residual):
        raise Declined(reason)
    if not on_gpu(x):
        return reference(x, weight, bias, residual, activation=activation)
    return run(TRITON, x, weight, bias, residual, activation)


def linear_hopper(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    if reason := declined(x, residual):
        raise Declined(reason)
    matrix = None if residual is None else flat(residual)
    if reason := hopper_declines(flat(x), weight, bias, matrix, activation):
        raise Declined(reason)
    return run(HOPPER, x, weight, bias, residual, activation)


linear = Operator(
    name="linear",
    axes={"M": "rows of x", "N": "columns of y", "K": "columns of x and of weight"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options=OPTIONS,
    differentiable=("x", "weight", "bias", "residual"),
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w.axes.values())),
    workloads=WORKLOADS,
    mutants=MUTANTS,
)

linear.implementation("triton", arch=">=sm_80")(linear_triton)
linear.implementation("cuda", arch="==sm_90", dtypes=("bf16", "fp16"), devices=("cuda",))(linear_hopper)
linear.implementation("torch")(composed)
linear.implementation("torch.compile", devices=("cuda",))(peers.Compiled(composed))
linear.implementation("cublaslt", devices=("cuda",), directions=("forward",))(cublaslt)
linear.implementation(
    "quack", requires="quack-kernels", devices=("cuda",), dtypes=("bf16", "fp16"), directions=("forward",)
)(quack)

# ---- what users call -------------------------------------------------------------------------------------------------


def check(name: str, x: Any, weight: Any, bias: Any, residual: Any, activation: Any) -> None:
    check_tensor(name, "x", x)
    check_tensor(name, "weight", weight)
    check_same(name, "weight", weight, "x", x)
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{name}: argument 'activation' is {activation!r:.40}; expected {known} or None")
    gated = linear_activations.of(activation).gated
    if not x.ndim:
        raise ValueError(f"{name}: argument 'x' is a scalar; expected [..., K]")
    k = x.shape[-1]
    if weight.ndim != 2 or weight.shape[1] != k or (gated and weight.shape[0] % 2):
        rows = "2N" if gated else "N"
        why = f" (gate, then up, for {activation!r})" if gated else ""
        raise ValueError(
            f"{name}: argument 'weight' has shape {tuple(weight.shape)} and 'x' {tuple(x.shape)}; expected weight "
            f"[{rows}, {k}]{why}"
        )
    if bias is not None:
        check_tensor(name, "bias", bias)
        check_same(name, "bias", bias, "x", x)
        if tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(
                f"{name}: argument 'bias' has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), an element for each "
                "row of 'weight'"
            )
    if residual is not None:
        check_tensor(name, "residual", residual)
        check_same(name, "residual", residual, "x", x)
        wanted = (*x.shape[:-1], weight.shape[0] // (2 if gated else 1))
        if tuple(residual.shape) != wanted:
            raise ValueError(
                f"{name}: argument 'residual' has shape {tuple(residual.shape)}; expected {wanted}, that of the result (it is "
                "not broadcast)"
            )


def handed_over(x: Tensor, weight: Tensor, residual: Tensor | None, *others: Tensor | None) -> str:
    """Why PyTorch computes a call wherever it runs (an empty string where a kernel of ours may)."""
    if not on_gpu(x):
        return "the tensors are on the CPU, where weft runs PyTorch's product"
    if traced(*(t for t in (x, weight, residual, *others) if t is not None)):
        return "traced: PyTorch's own operators, which a compiler sees"
    if math.prod(x.shape[:-1]) * weight.shape[0] == 0:
        return "empty: nothing to launch"
    if reason := declined(x, residual):
        return reason
    if x.dtype == torch.float32:
        return "fp32: cuBLAS's product is faster by more than an epilogue saves (README of the operator)"
    return ""


def without_hopper(k: int, reason: str, plans: Any = None) -> Choice:
    """The choice for sums of k terms that Hopper's main loop does not take, for this reason."""
    if k <= LONGEST_K:
        return Choice("triton", f"{reason}; up to {LONGEST_K} terms the epilogue saves more than the loop loses", plans)
    return Choice(
        "torch", f"{reason}; over {LONGEST_K} terms cuBLAS's product is faster by more than an epilogue saves"
    )


@linear.choice
@guarded
def choose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Choice:
    x, weight, bias, residual = cast_for_products(x, weight, bias, residual)
    check("linear", x, weight, bias, residual, activation)
    if reason := handed_over(x, weight, residual, bias):
        return Choice("torch", reason)
    if math.prod(x.shape[:-1]) <= MOST_ROWS:
        few = f"up to {MOST_ROWS} rows the weight's bytes are the limit, and what follows is little: see skinny_matmul"
        return Choice("torch", few)
    reason = NOT_HOPPER
    if target_sm(x.device) == 90:
        matrix = None if residual is None else flat(residual)
        if not (reason := hopper_declines(flat(x), weight, bias, matrix, activation)):
            return Choice(
                "cuda", "TMA, wgmma and warps that only fetch, with the epilogue in registers", _hopper_launch
            )
    return without_hopper(x.shape[-1], reason, _triton)


def _triton(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, biased: bool, added: bool, activation: str | None
) -> Any:
    ready = triton_plan(x, weight, bias, residual, activation, biased, added, False, default_precision())
    return lambda x, weight, bias, residual, y: ready(x, weight, bias, residual, y, y)


def _hopper_launch(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, biased: bool, added: bool, activation: str | None
) -> Any:
    return HopperLaunch(x, weight, residual, activation, biased, added)


def _public_plan(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, biased: bool, added: bool, activation: str | None
) -> Any:
    build = choose(x, weight, bias if biased else None, residual if added else None, activation=activation).plans
    if build is None:
        return None
    return build(flat(x), weight, bias, flat(residual) if added else residual, biased, added, activation)


public_plans = Plans(_public_plan)


@linear.function
def linear_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """A linear layer with its activation and residual: act(x · weightᵀ + bias) + residual, or act(gate) · up + residual.

    Args:
        x: [..., K]; float32, float16 or bfloat16, any strides.
        weight: [N, K] as ``torch.nn.Linear`` keeps it, of x's dtype and device, any strides; of a gated activation [2N, K],
            the gate's rows first.
        bias: [N], or [2N] of a gated activation; of x's dtype and device, or None.
        residual: [..., N], added last; of x's dtype and device, or None.
        activation: None, ``relu``, ``silu``, ``gelu`` (x Φ(x)) or ``gelu_tanh``; gated: ``reglu``, ``swiglu``, ``geglu`` or
            ``geglu_tanh``.

    Returns:
        [..., N] of x's dtype. Without a gradient wanted all is computed in fp32 and rounded once; where one is, what the
        activation is given is kept in x's dtype for it. Under autocast all tensors are cast as ``torch.nn.functional.linear``
        does. fp32 products follow ``torch.get_float32_matmul_precision()``.

    Raises:
        TypeError: not tensors of those dtypes, or dtypes that differ.
        ValueError: shapes or devices that do not fit, or an unknown activation.

    All four tensors have gradients; a gradient of the gradient is PyTorch's.
    """
    present = [t for t in (x, weight, bias, residual) if t is not None]
    if eager(*present):
        call = (x, weight, x if bias is None else bias, x if residual is None else residual)
        ready = public_plans.of(call, bias is not None, residual is not None, activation)
        if ready is not None:
            n = weight.shape[0] // (2 if linear_activations.of(activation).gated else 1)
            y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
            ready(*call, y)
            return y
    x, weight, bias, residual = cast_for_products(x, weight, bias, residual)
    chosen = choose(x, weight, bias, residual, activation=activation).implementation
    if chosen == "torch":
        return (composed if x.is_cuda else reference)(x, weight, bias, residual, activation=activation)
    return run(HOPPER if chosen == "cuda" else TRITON, x, weight, bias, residual, activation)
