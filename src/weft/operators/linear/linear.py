"""``linear(x, weight, bias, residual, activation=...)``: a linear layer with what follows it in one launch.

2·M·N·K operations, 4·M·N·K of a gated activation; bias, activation, gate and residual are done on the sums while they are in
registers, which saves a trip of [M, N] or [M, 2N] through memory for each (README.md).
"""

import dataclasses
import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Operator, Tolerance, Workload
from weft.operators import peers
from weft.operators.autograd import differentiable
from weft.operators.call import FLOATS_AND_64, Choice, cast_for_products, eager, guarded, on_gpu, product_dtype
from weft.operators.checks import check_shape
from weft.operators.hopper.gemm import ON_HOPPER
from weft.operators.hopper.padded import NOTHING
from weft.operators.linear import activations, dispatch
from weft.operators.linear.reference import (
    MUTANTS,
    OPTIONS,
    WORKLOADS,
    activation_of,
    composed,
    cost,
    gated,
    inputs,
    reference,
)
from weft.operators.matmul.dispatch import OF_QUACK


def _backward_terms(w: Workload) -> int:
    return (max(w.axes.values()) + (w["K"] if activation_of(w) else 0)) * (1 + gated(w))


linear = Operator(
    name="linear",
    axes={"M": "rows of x", "N": "columns of y", "K": "columns of x and of weight"},
    inputs=inputs,
    reference=reference,
    cost=cost,
    options=OPTIONS,
    differentiable=("x", "weight", "bias", "residual"),
    # of the longest sum; a gated activation multiplies two; in backward the activation's slope is taken at a sum over K
    tolerance={
        "forward": Tolerance(scale="tensor", terms=lambda w: max(w.axes.values()) * (1 + gated(w))),
        "backward": Tolerance(scale="tensor", terms=_backward_terms),
    },
    workspace=lambda w: (
        2 * (2 + gated(w)) * sum((x + 8) * (y + 8) for x, y in itertools.combinations(w.axes.values(), 2))
    ),
    workloads=WORKLOADS,
    mutants=MUTANTS,
)


def run(kernel: str, x: Tensor, weight: Tensor, bias: Any, residual: Any, activation: str | None) -> Tensor:
    matrices = (dispatch.flat(x), weight, bias, None if residual is None else dispatch.flat(residual))
    y: Tensor = differentiable(dispatch.Linear, kernel, activation, *matrices)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


def only_padded(c: dispatch.LinearCall) -> str:
    return dispatch.padded_unsupported(c) or ("" if dispatch.hopper_unsupported(c) else NOTHING)


UNSUPPORTED: dict[str, Any] = {"triton": dispatch.copy_unsupported, "cuda": dispatch.hopper_unsupported}
UNSUPPORTED |= {"cuda-padded": only_padded, "epilogue": dispatch.copy_unsupported, "gemv": dispatch.one_row_unsupported}


def by_kernel(kernel: str, *operands: Any, **named: Any) -> Tensor:
    tensors, options = dispatch.arguments(*operands, **named)
    c, activation = dispatch.LinearCall(*tensors, *options), options[-1]
    if reason := UNSUPPORTED[kernel](c):
        raise Declined(reason)
    if not on_gpu(c.x):
        return reference(c.x, c.weight, c.bias, c.residual, activation=activation)
    return run(kernel, c.x, c.weight, c.bias, c.residual, activation)


def cublaslt(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """cuBLASLt's own epilogues, bias with relu or the tanh form of gelu, through the one function of PyTorch that has them."""
    if bias is None or residual is not None or activation not in ("relu", "gelu_tanh") or x.ndim != 2:
        raise Declined("PyTorch gives a matrix a bias with relu or the tanh form of gelu, no more")
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=activation == "gelu_tanh")


QUACK = {name: name for name in ("relu", "silu", "reglu", "swiglu")}
QUACK |= {"gelu_tanh": "gelu_tanh_approx", "geglu_tanh": "geglu"}


def quack(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Its default configurations, which keep nothing for a gradient here."""
    from quack.gemm_interface import gemm_act, gemm_add

    if x.dtype == torch.float32 or x.ndim != 2 or any(n % 8 for n in (*x.shape, *weight.shape)):
        raise Declined("QuACK's takes matrices of 16-bit floats whose sizes are multiples of 8")
    if activation is None and residual is not None:
        return gemm_add(x, weight.t(), residual, bias=bias, tuned=False)
    if residual is not None or activation not in (None, *QUACK):
        raise Declined("QuACK has no residual after an activation, and of gelu the tanh form")
    how: dict[str, Any] = {"bias": bias, "activation": None if activation is None else QUACK[activation]}
    if activations.of(activation).gated:
        how["concat_layout"] = ("B",) if bias is None else ("B", "bias")
    return gemm_act(x, weight.t(), **how, store_preact=False, tuned=False)[1]


for _name in ("triton", "epilogue", "gemv"):
    linear.implementation(_name, backend="triton", arch=">=sm_80")(functools.partial(by_kernel, _name))
linear.implementation("cuda", **ON_HOPPER)(functools.partial(by_kernel, "cuda"))
linear.implementation("cuda-padded", backend="cuda", directions=("forward",), **ON_HOPPER)(
    functools.partial(by_kernel, "cuda-padded")
)
peers.register(linear, composed)
linear.implementation("cublaslt", devices=("cuda",), directions=("forward",))(cublaslt)
linear.implementation("quack", **OF_QUACK, directions=("forward",))(quack)


def residual_is_added_apart(x: Any, residual: Any) -> bool:
    """Whether PyTorch adds the residual, which has another dtype than the product."""
    both = isinstance(residual, Tensor) and isinstance(x, Tensor)
    return both and residual.dtype != product_dtype(x) and residual.dtype in FLOATS_AND_64


@linear.choice
@guarded
def choose(*operands: Any, direction: str = "forward", **named: Any) -> Choice:
    tensors, options = dispatch.arguments(*operands, **named)
    if options[1] and residual_is_added_apart(tensors[0], tensors[3]):
        tensors, options = (*tensors[:3], tensors[0]), (options[0], False, options[2])
    choice = dispatch.FORWARD.choose(*cast_for_products(*tensors), *options)
    if direction == "backward" and choice.implementation != "torch":  # the gradient follows the call
        how = "the activation's slope in one pass, then two products as matmul's, and the column sum of the bias"
        return dataclasses.replace(choice, reason=how)
    return choice


@linear.function
def linear_function(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """A linear layer with its activation and residual: act(x · weightᵀ + bias) + residual, or act(gate) · up + residual.

    Args:
        x: [..., K]; float32, float16 or bfloat16, any strides.
        weight: [N, K] as ``torch.nn.Linear`` keeps it, of x's dtype and device, any strides; of a gated activation [2N, K],
            the gate's rows first.
        bias: [N], or [2N] of a gated activation; of x's dtype and device, or None.
        residual: [..., N], added last; of x's device, or None. One of another dtype than the product's (fp32 beside bf16 under
            autocast) is added as PyTorch does, and the result has the wider dtype.
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
    if residual is not None and residual_is_added_apart(x, residual):
        y = linear_function(x, weight, bias, activation=activation)
        check_shape("linear", "residual", residual, residual.shape == y.shape, f"{tuple(y.shape)}, the result's")
        return y + residual
    tensors, options = dispatch.arguments(x, weight, bias, residual, activation)
    if eager(*tensors) and (ready := dispatch.FORWARD.of(tensors, *options)) is not None:
        n = weight.shape[0] // (2 if activations.of(activation).gated else 1)
        y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
        ready(*tensors, y, y)
        return y
    x, weight, bias, residual = cast_for_products(x, weight, bias, residual)
    chosen = choose(x, weight, bias, residual, activation=activation).implementation
    if chosen == "torch":
        return (composed if x.is_cuda else reference)(x, weight, bias, residual, activation=activation)
    return run(chosen, x, weight, bias, residual, activation)
