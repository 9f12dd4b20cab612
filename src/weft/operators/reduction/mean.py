"""``mean(x, dim=None)``: a sum divided by its number of elements, in fp32."""

from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Mutant, Operator, Tolerance
from weft.operators.reduction import kernels
from weft.operators.reduction.dispatch import Reduction
from weft.operators.reduction.kernels import SUM, Formula
from weft.operators.reduction.reduction import define, implement, reduce, size_of_terms, terms


def reference(
    x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0, dtype: dtype | None = None
) -> Tensor:
    return torch.mean(x, dim, keepdim, dtype=dtype)


FORMULA = Formula(kernels.itself, SUM, kernels.over_n)
reduction = Reduction("mean", reference, lambda order: FORMULA, mean=True, empty=True)


def _elements(x: Tensor, dim: int | None) -> int:
    return x.numel() if dim is None else x.shape[dim]


def _scale(arguments: dict[str, Any], _: Any) -> list[Tensor]:
    x, dim, keepdim = arguments["x"], arguments["dim"], arguments["keepdim"]
    return [size_of_terms(x, dim, keepdim) / max(_elements(x, dim), 1)]


def _one_more(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return (x.float().sum(dim, keepdim) / (_elements(x, dim) + 1)).to(x.dtype)


def _padded(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return (x.float().sum(dim, keepdim) / (1 << max(_elements(x, dim) - 1, 0).bit_length())).to(x.dtype)


mean = Operator(
    **define(
        reduction,
        Tolerance(scale=_scale, terms=terms),
        wrong=[
            Mutant("divided by one more", _one_more),
            Mutant("divided by the padded extent", _padded),
            Mutant("sum", lambda x, dim=None, keepdim=False: torch.sum(x, dim, keepdim)),
        ],
    )
)
implement(reduction, mean)


@mean.function
def mean_function(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False, *, dtype: dtype | None = None
) -> Tensor:
    """Mean over one dimension, or over all.

    Args:
        x, dim, keepdim: as of ``sum``.

    Returns:
        A tensor of x's dtype, added and divided in fp32 and rounded once. The same bits every time. The mean of no elements is
        NaN.

    Raises:
        TypeError, ValueError: as ``sum``.

    The gradient is that of the result over the number of elements, as a view of x's shape.
    """
    return reduce(reduction, x, dim, keepdim, 0.0, dtype)
