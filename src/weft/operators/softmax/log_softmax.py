"""``log_softmax(x, dim=-1)``: x - logsumexp(x) along one dimension, forward and backward; memory bandwidth is the limit."""

from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Mutant, Operator, Tolerance, workload
from weft.operators.call import eager
from weft.operators.softmax.dispatch import FORWARD
from weft.operators.softmax.softmax import RowSoftmax, definition, row_sum


def reference(x: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(x, dim)


def gradient_terms(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """dx is a difference that vanishes at N = 1: how large its terms are."""
    (dy,), dim = gradients, arguments["dim"]
    return [dy.abs() + torch.softmax(arguments["x"], dim) * row_sum(dy.square(), dim).sqrt()]


def softmax_gradient(dy: Tensor, x: Tensor, dim: int = -1) -> tuple[Tensor]:
    return (torch.softmax(x, dim) * (dy - row_sum(dy, dim)),)


log_softmax = Operator(
    **definition(
        "log_softmax",
        reference,
        {"forward": Tolerance(scale="row", ulps=2.0), "backward": Tolerance(scale=gradient_terms, terms=lambda w: 32)},
        [
            Mutant("softmax", lambda x, dim=-1: torch.softmax(x, dim)),
            Mutant("softmax's gradient", softmax_gradient, "backward"),
        ],
        {"model": [workload("bf16", M=4096, N=128256)]},
        logs=True,
    )
)


calls = RowSoftmax(logs=True)
calls.register(log_softmax)


@log_softmax.function
def log_softmax_function(x: Tensor, dim: int = -1, *, dtype: dtype | None = None) -> Tensor:
    """Logarithm of the softmax along one dimension.

    Args:
        x, dim, dtype: as of ``softmax``.

    Returns:
        A tensor of x's shape and dtype; NaN, autocast and what is saved for backward are as of ``softmax``.

    Raises:
        TypeError, ValueError: as ``softmax``.
    """
    if dtype is None and eager(x) and (plan := FORWARD.of((x,), dim, True)) is not None:
        y = torch.empty_like(x)
        plan(x, y)
        return y
    return calls(x, dim, dtype)
