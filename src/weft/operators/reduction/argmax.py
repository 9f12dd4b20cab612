"""``argmax(x, dim=None)``: where the largest value lies; the first of equals, and NaN is above all, as in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined, Mutant, Operator, Tolerance
from weft.operators.reduction import argmax_tiny
from weft.operators.reduction.definition import define
from weft.operators.reduction.reduction import COPY, Ready, Reduction
from weft.operators.reduction.views import View, view_of


def reference(x: Tensor, dim: int | None = None, keepdim: bool = False, order: float = 0.0) -> Tensor:
    return torch.argmax(x, dim, keepdim)


class Places(Reduction):
    """Of which tiny rows have a kernel of their own."""

    def _tiny_plan(self, x: Tensor, dim: int | None, keepdim: bool, order: float, dtype: torch.dtype) -> Ready:
        if dim is None:
            raise Declined("a search in everything; the kernel takes rows")
        view = view_of(x, dim % x.ndim, in_order=True)
        if view is None:
            raise Declined(COPY)
        return Ready(argmax_tiny.plan(x, view), x, dim % x.ndim, keepdim)

    def why_not_tiny(self, x: Tensor, view: View, order: float) -> str:
        return argmax_tiny.why_not(x, view) or argmax_tiny.slower(x, view)


reduction = Places("argmax", reference, None)


def _last(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    flipped = torch.argmax(x.flatten().flip(0) if dim is None else x.flip(dim), dim, keepdim)
    return ((x.numel() if dim is None else x.shape[dim]) - 1 - flipped).view(reference(x, dim, keepdim).shape)


def _numbers_only(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return reference(x.nan_to_num(-torch.inf, torch.inf, -torch.inf), dim, keepdim)


argmax = Operator(
    **define(
        "argmax",
        reference,
        flops=2,
        tolerance=Tolerance(exact=True),
        result_bytes=8,
        ties=True,
        tuned=True,
        wrong=[
            Mutant("last of equals", _last),
            Mutant("NaN passed over", _numbers_only),
            Mutant("of magnitudes", lambda x, dim=None, keepdim=False: reference(x.abs(), dim, keepdim)),
            Mutant("smallest", lambda x, dim=None, keepdim=False: torch.argmin(x, dim, keepdim)),
        ],
    )
)


def _call(function: Any) -> Any:
    return lambda x, dim=None, keepdim=False: function(x, dim, keepdim, 0.0)


reduction.implement(argmax, _call)


argmax.implementation("cuda", arch=">=sm_80", devices=("cuda",))(_call(reduction.cuda))


@argmax.function
def argmax_function(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The place of the largest value along one dimension, or in all of x (counted in the order of its elements).

    Args:
        x: any shape; float32, float16 or bfloat16.
        dim: the dimension to search; None for all.
        keepdim: keep the dimension, with one element.

    Returns:
        int64. Of equal values the first; NaN counts as the largest. PyTorch promises neither, but does both.

    Raises:
        TypeError: x is not a tensor of those dtypes, dim not an int, or keepdim not a bool.
        ValueError: dim is out of range, or there is nothing along it.
    """
    return reduction(x, dim, keepdim, 0.0)
