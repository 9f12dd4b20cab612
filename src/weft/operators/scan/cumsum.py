"""``cumsum(x, dim=-1)``: running sums. One read, one write and one addition an element: nothing but bandwidth."""

from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Mutant, Operator, Tolerance
from weft.operators import mutants
from weft.operators.reduction.kernels import plus
from weft.operators.scan import kernels
from weft.operators.scan.dispatch import ColumnsKernel, RowsKernel, Scan
from weft.operators.scan.kernels import Formula
from weft.operators.scan.scan import define, implement, scan_along

scan = Scan(
    "cumsum", torch.cumsum, Formula("cumsum", kernels.running_sum, kernels.total_sum, plus, 0.0),
    RowsKernel("Sum"), ColumnsKernel("columns.cu", "scan_columns<{}, Sum"), log=None, wide_in_autocast=True,
)  # fmt: skip


def _squares(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "x": arguments["x"].square()}


def _forward_scale(arguments: dict[str, Any], _: Any) -> list[Tensor]:
    """The size that the rounding of a running sum is relative to: terms may cancel, their squares do not."""
    return [scan.reference(**_squares(arguments)).sqrt()]


def _backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    reversed_scan = {**arguments, "x": gradients[0], "reverse": not arguments["reverse"]}
    return [scan.reference(**_squares(reversed_scan)).sqrt()]


def _rounded(x: Tensor) -> Tensor:
    """Terms lose their last bits."""
    return (x.float() * (1 + 2**-7)).to(x.dtype)


cumsum = Operator(
    **define(
        scan,
        {
            "forward": Tolerance(scale=_forward_scale, terms=lambda w: 256),
            "backward": Tolerance(scale=_backward_scale, terms=lambda w: 256),
        },
        wrong=[Mutant("rounded terms", mutants.changed(scan.reference, x=_rounded))],
        gradient_wrong=[Mutant("not reversed", lambda dy, x, **how: (scan.reference(dy, **how),), "backward")],
    )
)
implement(scan, cumsum)


@cumsum.function
def cumsum_function(
    x: Tensor, dim: int = -1, *, exclusive: bool = False, reverse: bool = False, dtype: dtype | None = None
) -> Tensor:
    """Running sums along one dimension.

    Args:
        x: any shape; float32, float16 or bfloat16.
        dim: the dimension to add along.
        exclusive: leave each element out of its own sum; the first result is 0.
        reverse: add from the end.
        dtype: of the result; x is cast to it first. None for x's.

    Returns:
        A tensor of x's shape and dtype (float32 under autocast, as PyTorch), added in fp32 and rounded once. The same bits
        every time.

    Raises:
        TypeError: x is not a tensor of those dtypes, dim not an int, exclusive or reverse not a bool, dtype no floating one.
        ValueError: dim is out of range.

    The gradient is a running sum from the other end. Source: decoupled look-back, Merrill & Garland 2016, with a fixed order.
    """
    return scan_along(scan, x, dim, exclusive, reverse, dtype)
