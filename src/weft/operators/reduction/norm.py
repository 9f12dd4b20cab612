"""``norm(x, p=2, dim=None)``: the p-norm over one axis or everything, p = 1, 2 or infinity, as ``torch.linalg.vector_norm``."""

import math
import sys
from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Mutant, Operator, Tolerance, Workload, workload
from weft.operators import mutants
from weft.operators.checks import check_value, is_number
from weft.operators.reduction import kernels
from weft.operators.reduction.dispatch import Reduction
from weft.operators.reduction.kernels import LARGEST, SUM, Formula
from weft.operators.reduction.reduction import define, every_tie, implement, inputs, reduce, terms

FORMULAS = {
    1.0: Formula(kernels.magnitude, SUM, gradient=kernels.signed_by),
    2.0: Formula(kernels.square, SUM, kernels.root, gradient=kernels.direction),
    math.inf: Formula(kernels.magnitude, LARGEST, gradient=kernels.share_of_magnitude, tie=kernels.equal_magnitude),
}


def in_order(
    x: Tensor, dim: Any = None, keepdim: bool = False, order: float = 2.0, dtype: dtype | None = None
) -> Tensor:
    if order == math.inf and not x.numel():
        order = 1.0  # PyTorch has no largest of nothing; of magnitudes it is 0, as their sum
    return torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype)


reduction = Reduction("norm", in_order, FORMULAS.get, empty=True, wide_in_autocast=True)


def order_of(p: float) -> float:
    check_value("norm", "p", p, is_number(p), "a number", TypeError)
    fits = p == p and not sys.float_info.max < abs(p) < math.inf
    check_value("norm", "p", p, fits, "an order that is a number and fits a float")
    return float(p)


def _call(function: Any) -> Any:
    return lambda x, p=2.0, dim=None, keepdim=False, **dtype: function(x, dim, keepdim, order_of(p), **dtype)


reference = _call(in_order)


def norm_inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    drawn = inputs(w, g, device)
    return {"x": drawn.pop("x"), "p": float(w.option("p", 2)), **drawn}


def _signs_kept(x: Tensor, p: float = 2.0, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return torch.sum(x, dim, keepdim).abs() if p == 1 else reference(x, p, dim, keepdim)


def _not_divided(dy: Tensor, x: Tensor, p: float = 2.0, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor]:
    return (x * (dy if dim is None or keepdim else dy.unsqueeze(dim)),)


norm = Operator(
    **define(
        reduction,
        {"forward": Tolerance(scale="element", terms=terms), "backward": Tolerance(scale="element", ulps=3)},
        reference=reference,
        flops=2,
        make_inputs=norm_inputs,
        options={"p": (1, 2, "inf")},
        more=[
            *(workload(M=9, N=33, p=p) for p in (1, "inf")),
            *(workload(M=70, N=21, p=p, dim=0) for p in (1, "inf")),
            *(workload(M=9, N=129, p=p, dim="all") for p in (1, "inf")),
            *(workload(M=200, N=11, p=p, values="nonfinite") for p in (1, "inf")),
            workload(M=9, N=40, p="inf", values="ties"),
            workload(M=9, N=400, p="inf", values="ties"),
        ],
        wrong=[
            Mutant("no root", lambda **arguments: reference(**arguments).square()),
            Mutant("signs kept", _signs_kept),
            Mutant("always of order 2", mutants.changed(reference, p=lambda p: 2.0)),
        ],
        gradient_wrong=[
            Mutant("not divided by the norm", _not_divided, "backward"),
            Mutant("all to each of equals", every_tie(reference), "backward"),
        ],
    )
)
implement(reduction, norm, _call)


@norm.function
def norm_function(
    x: Tensor,
    p: float = 2.0,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    dtype: dtype | None = None,
) -> Tensor:
    """Norm over one dimension, or over all: (Σ|x|^p)^(1/p).

    Args:
        x, dim, keepdim, dtype: as of ``sum``, but not narrower than x.
        p: order. 1, 2 and infinity have kernels; others are handed to PyTorch.

    Returns:
        A tensor of x's dtype (float32 under autocast, as PyTorch), added in fp32 and rounded once. Squares are not scaled:
        they overflow where PyTorch's do. The norm of no elements is 0 (of a negative order an error).

    Raises:
        TypeError, ValueError: as ``sum``; TypeError for a p that is no number, ValueError for a negative order of no elements.

    Gradients: 0 where the norm is 0; of order infinity shared evenly by all elements of the largest magnitude.
    """
    order = order_of(p)
    if order < 0 and reduction.along(x, reduction.check(x, dim, keepdim)) == 0:
        raise ValueError(
            f"norm: argument 'p' is {p} and 'x' has shape {tuple(x.shape)}, no elements along dim={dim}; expected an order "
            "of at least 0, or elements"
        )
    return reduce(reduction, x, dim, keepdim, order, dtype)
