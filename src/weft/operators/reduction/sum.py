"""``sum(x, dim=None)``: over one axis or everything. One read of x and one addition an element: nothing but bandwidth."""

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Mutant, Operator
from weft.operators.reduction import kernels
from weft.operators.reduction.dispatch import Reduction
from weft.operators.reduction.kernels import SUM, Formula
from weft.operators.reduction.reduction import SUMS, define, implement, reduce


def reference(
    x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0, dtype: dtype | None = None
) -> Tensor:
    return torch.sum(x, dim, keepdim, dtype=dtype)


FORMULA = Formula(kernels.itself, SUM)
reduction = Reduction("sum", reference, lambda order: FORMULA, empty=True, wide_in_autocast=True)


def _but_first(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if not x.numel():
        return reference(x, dim, keepdim)
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
        reduction,
        SUMS,
        tuned=True,
        wrong=[
            Mutant("first left out", _but_first),
            Mutant("added in the input's dtype", _one_after_the_other),
            Mutant("mean", lambda x, dim=None, keepdim=False: torch.mean(x, dim, keepdim)),
        ],
    )
)
implement(reduction, sum)


@sum.function
def sum_function(
    x: Tensor, dim: int | tuple[int, ...] | None = None, keepdim: bool = False, *, dtype: dtype | None = None
) -> Tensor:
    """Sum over one dimension, or over all.

    Args:
        x: any shape; float32, float16 or bfloat16.
        dim: the dimension to add up, or several; None for all. Neighbours that a view makes one take the kernels.
        keepdim: keep the dimension, with one element.
        dtype: of the result; x is cast to it first. None for x's.

    Returns:
        A tensor of x's dtype (float32 under autocast, as PyTorch), added in fp32 and rounded once. The same bits every time.
        The sum of no elements is 0.

    Raises:
        TypeError: x is not a tensor of those dtypes, dim not an int or several, keepdim not a bool, dtype no floating one.
        ValueError: dim is out of range, or given twice.

    The gradient is that of the result, as a view of x's shape: nothing of x's size is written.
    """
    return reduce(reduction, x, dim, keepdim, 0.0, dtype)
