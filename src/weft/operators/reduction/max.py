"""``max(x, dim=None)``: the largest value over one axis or everything; NaN if there is any, as ``torch.amax``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Tolerance
from weft.operators.reduction import kernels
from weft.operators.reduction.definition import define, every_tie, one_tie
from weft.operators.reduction.plans import LARGEST, Formula, Spread
from weft.operators.reduction.reduction import Reduction


def reference(x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0) -> Tensor:
    return torch.amax(x, () if dim is None else dim, keepdim)


INF = float("inf")
reduction = Reduction(
    "max",
    reference,
    lambda order: Formula(kernels.itself, LARGEST, neutral=-INF, other=-INF),
    lambda order: Spread(kernels.share_of_maximum, kernels.equal, unseen=-INF, bits=True),
)


def _numbers_only(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return reference(x.nan_to_num(-INF, INF, -INF), dim, keepdim)


max = Operator(
    **define(
        "max",
        reference,
        backward=True,
        backward_bits=True,
        tolerance={"forward": Tolerance(exact=True), "backward": Tolerance(scale="element")},
        ties=True,
        tuned=True,
        wrong=[
            Mutant("NaN passed over", _numbers_only),
            Mutant("starts from 0", lambda x, dim=None, keepdim=False: reference(x, dim, keepdim).clamp_min(0)),
            Mutant("of magnitudes", lambda x, dim=None, keepdim=False: reference(x.abs(), dim, keepdim)),
        ],
        gradient_wrong=[
            Mutant("all to the first of equals", one_tie(reference), "backward"),
            Mutant("all to each of equals", every_tie(reference), "backward"),
        ],
    )
)


def _call(function: Any) -> Any:
    return lambda x, dim=None, keepdim=False: function(x, dim, keepdim, 0.0)


reduction.implement(max, _call)


@max.function
def max_function(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Largest value over one dimension, or over all; ``weft.ops.argmax`` gives the place of a maximum.

    Args:
        x: any shape; float32, float16 or bfloat16.
        dim: the dimension to reduce; None for all.
        keepdim: keep the dimension, with one element.

    Returns:
        A tensor of x's dtype: values alone, as ``torch.amax``. NaN where there is any.

    Raises:
        TypeError: x is not a tensor of those dtypes, dim not an int, or keepdim not a bool.
        ValueError: dim is out of range, or there is nothing along it.

    The gradient is shared evenly by all elements that equal the result.
    """
    return reduction(x, dim, keepdim, 0.0)
