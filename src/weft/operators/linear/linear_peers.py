"""What others have of a linear layer with its epilogue in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.linear import linear_activations


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
    if linear_activations.of(activation).gated:
        how["concat_layout"] = ("B",) if bias is None else ("B", "bias")
    y: Tensor = gemm_act(x, weight.t(), **how, store_preact=False, tuned=False)[1]
    return y
