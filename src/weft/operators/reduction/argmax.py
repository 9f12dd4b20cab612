"""``argmax(x, dim=None)``: the index of the largest value; the first of equals, and NaN is above all, as in PyTorch."""

import math

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Tolerance
from weft.operators import mutants
from weft.operators.reduction.dispatch import Reduction
from weft.operators.reduction.reduction import define, implement, reduce


def reference(x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0) -> Tensor:
    return torch.argmax(x, dim, keepdim)


reduction = Reduction("argmax", reference, None)


def _last(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    flipped = torch.argmax(x.flatten().flip(0) if dim is None else x.flip(dim), dim, keepdim)
    return ((x.numel() if dim is None else x.shape[dim]) - 1 - flipped).view(reference(x, dim, keepdim).shape)


argmax = Operator(
    **define(
        reduction,
        Tolerance(exact=True),
        flops=2,
        tuned=True,
        wrong=[
            Mutant("last of equals", _last),
            Mutant("NaN ignored", mutants.changed(reference, x=lambda x: x.nan_to_num(-math.inf, math.inf, -math.inf))),
            Mutant("of magnitudes", mutants.changed(reference, x=torch.abs)),
            Mutant("smallest", lambda x, dim=None, keepdim=False: torch.argmin(x, dim, keepdim)),
        ],
    )
)
implement(reduction, argmax)


@argmax.function
def argmax_function(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the largest value along one dimension, or in all of x (counted in the order of its elements).

    Args:
        x, dim, keepdim: as of ``sum``.

    Returns:
        int64. Of equal values the first; NaN counts as the largest. PyTorch does both, and documents neither.

    Raises:
        TypeError, ValueError: as ``sum``; ValueError also where there is nothing along dim.
    """
    return reduce(reduction, x, dim, keepdim)
