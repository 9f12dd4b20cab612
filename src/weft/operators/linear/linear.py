"""``linear(x, weight, bias, residual, activation=...)``: a linear layer with what follows it in one launch.

2·M·N·K operations, 4·M·N·K of a gated activation; bias, activation, gate and residual are done on the sums while they are in
registers, which saves a trip of [M, N] or [M, 2N] through memory for each (README.md).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator, Tolerance
from weft.operators import peers
from weft.operators.call import Choice, cast_for_products, differentiable, eager, guarded, on_gpu
from weft.operators.linear import activations
from weft.operators.linear.dispatch import (
    FORWARD,
    Linear,
    LinearCall,
    choice_of,
    copy_unsupported,
    flat,
    hopper_unsupported,
)
from weft.operators.linear.reference import MUTANTS, OPTIONS, WORKLOADS, composed, cost, gated, inputs, reference

linear = Operator(
    name="linear",
    axes={"M": "rows of x", "N": "columns of y", "K": "columns of x and of weight"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    directions=("forward", "backward"),
    options=OPTIONS,
    differentiable=("x", "weight", "bias", "residual"),
    # of the longest sum; a gated activation multiplies two
    tolerance=Tolerance(scale="tensor", terms=lambda w: max(w.axes.values()) * (1 + gated(w))),
    workloads=WORKLOADS,
    mutants=MUTANTS,
)

# ---- implementations -------------------------------------------------------------------------------------------------


def call(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None
) -> tuple[Any, ...]:
    """The arguments of :class:`LinearCall`."""
    tensors = (x, weight, x if bias is None else bias, x if residual is None else residual)
    return (*tensors, bias is not None, residual is not None, activation)


def run(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None
) -> Tensor:
    y: Tensor = differentiable(
        Linear, flat(x), weight, bias, None if residual is None else flat(residual), activation, kernel
    )
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


def by_kernel(
    kernel: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    unsupported = {"triton": copy_unsupported, "cuda": hopper_unsupported}[kernel]
    if reason := unsupported(LinearCall(*call(x, weight, bias, residual, activation))):
        raise Declined(reason)
    if not on_gpu(x):
        return reference(x, weight, bias, residual, activation=activation)
    return run(kernel, x, weight, bias, residual, activation)


def cublaslt(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """cuBLASLt's own epilogues, bias with relu or the tanh form of gelu, through the one function of PyTorch that has them."""
    if bias is None or residual is not None or activation not in ("relu", "gelu_tanh") or x.ndim != 2:
        raise Declined("PyTorch gives a matrix a bias with relu or the tanh form of gelu, no more")
    y: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=activation == "gelu_tanh")
    return y


QUACK = {name: name for name in ("relu", "silu", "reglu", "swiglu")}
QUACK |= {"gelu_tanh": "gelu_tanh_approx", "geglu_tanh": "geglu"}


def quack(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """Its default configurations, which keep nothing for a gradient here."""
    from quack.gemm_interface import gemm_act, gemm_add

    if x.dtype == torch.float32 or x.ndim != 2 or any(n % 8 for n in (*x.shape, *weight.shape)):
        raise Declined("QuACK's takes matrices of 16-bit floats whose sizes are multiples of 8")
    if activation is None and residual is not None:
        added: Tensor = gemm_add(x, weight.t(), residual, bias=bias, tuned=False)
        return added
    if residual is not None or activation not in (None, *QUACK):
        raise Declined("QuACK has no residual after an activation, and of gelu the tanh form")
    how: dict[str, Any] = {"bias": bias, "activation": None if activation is None else QUACK[activation]}
    if activations.of(activation).gated:
        how["concat_layout"] = ("B",) if bias is None else ("B", "bias")
    y: Tensor = gemm_act(x, weight.t(), **how, store_preact=False, tuned=False)[1]
    return y


linear.implementation("triton", arch=">=sm_80")(functools.partial(by_kernel, "triton"))
linear.implementation("cuda", arch="==sm_90", dtypes=("bf16", "fp16"), devices=("cuda",))(
    functools.partial(by_kernel, "cuda")
)
linear.implementation("torch")(composed)
linear.implementation("torch.compile", devices=("cuda",))(peers.Compiled(composed))
linear.implementation("cublaslt", devices=("cuda",), directions=("forward",))(cublaslt)
linear.implementation(
    "quack", requires="quack-kernels", devices=("cuda",), dtypes=("bf16", "fp16"), directions=("forward",)
)(quack)

# ---- what users call -------------------------------------------------------------------------------------------------


@linear.choice
@guarded
def choose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str | None = None,
    direction: str = "forward",
) -> Choice:
    x, weight, bias, residual = cast_for_products(x, weight, bias, residual)
    return choice_of(direction, *call(x, weight, bias, residual, activation))


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
        tensors = (x, weight, x if bias is None else bias, x if residual is None else residual)
        ready = FORWARD.of(tensors, bias is not None, residual is not None, activation)
        if ready is not None:
            n = weight.shape[0] // (2 if activations.of(activation).gated else 1)
            y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
            ready(*tensors, y, y)
            return y
    x, weight, bias, residual = cast_for_products(x, weight, bias, residual)
    chosen = choose(x, weight, bias, residual, activation=activation).implementation
    if chosen == "torch":
        return (composed if x.is_cuda else reference)(x, weight, bias, residual, activation=activation)
    return run(chosen, x, weight, bias, residual, activation)
