"""``mean(x, dim=None)``: a sum divided by its number of elements, in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Tolerance
from weft.operators.reduction import kernels
from weft.operators.reduction.definition import define, size_of_terms, terms
from weft.operators.reduction.plans import SUM, Formula
from weft.operators.reduction.reduction import Reduction


def reference(x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0) -> Tensor:
    return torch.mean(x, dim, keepdim)


reduction = Reduction(
    "mean", reference, lambda order: Formula(kernels.itself, SUM, kernels.over_n), mean=True, empty=True
)


def _scale(arguments: dict[str, Any], _: Any) -> list[Tensor]:
    x, dim, keepdim = arguments["x"], arguments["dim"], arguments["keepdim"]
    return [size_of_terms(x, dim, keepdim) / max(x.numel() if dim is None else x.shape[dim], 1)]


def _over(shift: int) -> Any:
    """Divided by a wrong number."""

    def mutant(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        n = x.numel() if dim is None else x.shape[dim]
        return (x.float().sum(dim, keepdim) / (n + shift)).to(x.dtype)

    return mutant


mean = Operator(
    **define(
        "mean",
        reference,
        tolerance=Tolerance(scale=_scale, terms=terms),
        empty=True,
        wrong=[
            Mutant("divided by one more", _over(1)),
            Mutant("divided by the padded extent", lambda x, dim=None, keepdim=False: _padded(x, dim, keepdim)),
            Mutant("sum", lambda x, dim=None, keepdim=False: torch.sum(x, dim, keepdim)),
        ],
    )
)


def _padded(x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    n = x.numel() if dim is None else x.shape[dim]
    return _over((1 << max(n - 1, 0).bit_length()) - n)(x, dim, keepdim)


def _call(function: Any) -> Any:
    return lambda x, dim=None, keepdim=False: function(x, dim, keepdim, 0.0)


reduction.implement(mean, _call)


@mean.function
def mean_function(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Mean over one dimension, or over all.

    Args:
        x: any shape; float32, float16 or bfloat16.
        dim: the dimension to average; None for all.
        keepdim: keep the dimension, with one element.

    Returns:
        A tensor of x's dtype, added and divided in fp32 and rounded once. The same bits every time. The mean of nothing is NaN.

    Raises:
        TypeError: x is not a tensor of those dtypes, dim not an int, or keepdim not a bool.
        ValueError: dim is out of range.

    The gradient is that of the result over the number of elements, as a view of x's shape.
    """
    return reduction(x, dim, keepdim, 0.0)
