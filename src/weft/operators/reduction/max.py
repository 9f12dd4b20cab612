"""``max(x, dim=None)``: the largest value over one axis or everything; NaN if there is any, as ``torch.amax``."""

import math
from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Tolerance
from weft.operators import mutants
from weft.operators.reduction import kernels
from weft.operators.reduction.dispatch import Reduction
from weft.operators.reduction.kernels import LARGEST, Formula
from weft.operators.reduction.reduction import define, every_tie, implement, one_tie, reduce


def extremum(op: Reduction, sign: int, *, tuned: bool = False) -> dict[str, Any]:
    """The definition of ``max`` (sign 1) or ``min`` (sign -1)."""

    def without_nan(x: Tensor) -> Tensor:
        return x.nan_to_num(-sign * math.inf, math.inf, -math.inf)

    def from_zero(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        best = op.reference(x, dim, keepdim)
        return best.clamp_min(0) if sign > 0 else best.clamp_max(0)

    return define(
        op,
        {"forward": Tolerance(exact=True), "backward": Tolerance(scale="element")},
        tuned=tuned,
        wrong=[
            Mutant("NaN ignored", mutants.changed(op.reference, x=without_nan)),
            Mutant("starts from 0", from_zero),
            Mutant("of magnitudes", mutants.changed(op.reference, x=lambda x: sign * x.abs())),
        ],
        gradient_wrong=[
            Mutant("all to the first of equals", one_tie(op.reference), "backward"),
            Mutant("all to each of equals", every_tie(op.reference), "backward"),
        ],
    )


def reference(x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0) -> Tensor:
    return torch.amax(x, () if dim is None else dim, keepdim)


FORMULA = Formula(kernels.itself, LARGEST, neutral=-math.inf, other=-math.inf, extremum=True)
reduction = Reduction("max", reference, lambda order: FORMULA)
max = Operator(**extremum(reduction, 1, tuned=True))
implement(reduction, max)


@max.function
def max_function(x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Largest value over one dimension, or over all; ``weft.ops.argmax`` gives the index of a maximum.

    Args:
        x, dim, keepdim: as of ``sum``.

    Returns:
        A tensor of x's dtype: values alone, as ``torch.amax``. NaN where there is any.

    Raises:
        TypeError, ValueError: as ``sum``; ValueError also where there is nothing along dim.

    The gradient is shared evenly by all elements that equal the result.
    """
    return reduce(reduction, x, dim, keepdim)
