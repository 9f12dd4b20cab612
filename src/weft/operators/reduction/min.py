"""``min(x, dim=None)``: the smallest value over one axis or everything; NaN if there is any, as ``torch.amin``."""

import math

import torch
from torch import Tensor

from weft.definition import Operator
from weft.operators.reduction import kernels
from weft.operators.reduction.dispatch import Reduction
from weft.operators.reduction.kernels import LARGEST, Formula
from weft.operators.reduction.max import extremum
from weft.operators.reduction.reduction import implement, reduce


def reference(x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0) -> Tensor:
    return torch.amin(x, () if dim is None else dim, keepdim)


# the largest of the negated elements: one join serves both, and a sign costs no instruction of its own
FORMULA = Formula(kernels.negative, LARGEST, kernels.negated, neutral=-math.inf, other=math.inf, extremum=True)
reduction = Reduction("min", reference, lambda order: FORMULA)
min = Operator(**extremum(reduction, -1))
implement(reduction, min)


@min.function
def min_function(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Smallest value over one dimension, or over all; its gradient is that of ``weft.ops.max``.

    Args:
        x, dim, keepdim: as of ``sum``.

    Returns:
        A tensor of x's dtype: values alone, as ``torch.amin``. NaN where there is any.

    Raises:
        TypeError, ValueError: as ``sum``; ValueError also where there is nothing along dim.
    """
    return reduce(reduction, x, dim, keepdim)
