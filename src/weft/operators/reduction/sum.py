"""``sum(x, dim=None)``: over one axis or everything. One read of x and one addition an element: nothing but bandwidth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.reduction import kernels
from weft.operators.reduction.definition import SUMS, define
from weft.operators.reduction.plans import SUM, Formula
from weft.operators.reduction.reduction import Reduction


def reference(x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0) -> Tensor:
    return torch.sum(x, dim, keepdim)


reduction = Reduction("sum", reference, lambda order: Formula(kernels.itself, SUM), empty=True, wide_in_autocast=True)


def _but_first(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return reference(x, dim, keepdim) - (x.flatten()[0] if dim is None else x.narrow(dim, 0, 1).sum(dim, keepdim))


def _one_after_the_other(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """In the input's dtype."""
    if dim is None:
        total = x.flatten().cumsum(0)[-1] if x.dtype == torch.float32 else x.flatten().float().cumsum(0)[-1] * 1.01
        return total.to(x.dtype).view((1,) * x.ndim if keepdim else ())
    out = torch.zeros_like(x.select(dim, 0)) if x.shape[dim] else x.sum(dim)
    for part in x.unbind(dim):
        out = out + (part.half().to(x.dtype) if x.dtype == torch.float32 else part)
    return out.unsqueeze(dim) if keepdim else out


sum = Operator(
    **define(
        "sum",
        reference,
        tolerance=SUMS,
        empty=True,
        tuned=True,
        wrong=[
            Mutant("first left out", lambda x, dim=None, keepdim=False: _guarded(_but_first, x, dim, keepdim)),
            Mutant("added in the input's dtype", _one_after_the_other),
            Mutant("mean", lambda x, dim=None, keepdim=False: torch.mean(x, dim, keepdim)),
        ],
    )
)


def _guarded(function: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    return function(x, dim, keepdim) if x.numel() else reference(x, dim, keepdim)


def _call(function: Any) -> Any:
    return lambda x, dim=None, keepdim=False: function(x, dim, keepdim, 0.0)


reduction.implement(sum, _call)


@sum.function
def sum_function(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Sum over one dimension, or over all.

    Args:
        x: any shape; float32, float16 or bfloat16.
        dim: the dimension to add up; None for all.
        keepdim: keep the dimension, with one element.

    Returns:
        A tensor of x's dtype (float32 under autocast, as PyTorch), added in fp32 and rounded once. The same bits every time.
        Nothing adds up to 0.

    Raises:
        TypeError: x is not a tensor of those dtypes, dim not an int, or keepdim not a bool.
        ValueError: dim is out of range.

    The gradient is that of the result, as a view of x's shape: nothing of x's size is written.
    """
    return reduction(x, dim, keepdim, 0.0)
