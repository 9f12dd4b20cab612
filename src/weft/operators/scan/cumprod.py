"""``cumprod(x, dim=-1)``: running products. One read and one write an element; the gradient reads x, y and dy."""

from typing import Any

import torch
from torch import Tensor, dtype  # a name alone, as the stubs want annotations

from weft.definition import Mutant, Operator, Tolerance, Workload, workload
from weft.operators.scan import kernels
from weft.operators.scan.dispatch import ColumnsKernel, RowsKernel, Scan
from weft.operators.scan.kernels import Formula
from weft.operators.scan.scan import define, implement, inputs, scan_along

scan = Scan(
    "cumprod", torch.cumprod,
    Formula("cumprod", kernels.running_product, kernels.total_product, kernels.times, 1.0, scaled=True),
    RowsKernel("Product"), ColumnsKernel("columns.cu", "scan_columns<{}, Product"), log=False, wide_in_autocast=True,
)  # fmt: skip


def near_one(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Factors around 1, so that long products neither vanish nor overflow."""
    arguments = inputs(w, g, device)
    if device != "meta" and w.option("values", "normal") == "normal":
        x = arguments["x"]
        (x[:1] if w.option("layout") == "expanded" else x).mul_(2**-6).add_(1.0)
    return arguments


def _factors(w: Workload) -> int:
    """Each factor rounds once, and so does each gradient that runs back through all of them."""
    return 4 * (w["N"] if w.option("inner") or w.option("dim", -1) else w["M"])


def _by_division(dy: Tensor, x: Tensor, dim: int, exclusive: bool, reverse: bool) -> tuple[Tensor, ...]:
    """Right where no factor is 0."""
    y = scan.reference(x, dim, exclusive, reverse)
    return ((scan.scan((y * dy).flip(dim), dim).flip(dim) / (x + (x == 0) * 1e-3)).to(x.dtype),)


cumprod = Operator(
    **define(
        scan,
        {
            "forward": Tolerance(scale="element", terms=_factors),
            "backward": Tolerance(scale="row", terms=_factors),
        },
        make_inputs=near_one,
        more=[
            workload(M=9, N=12, values="zeros"),
            workload(M=12, N=9, dim=0, values="zeros"),
            workload(M=9, N=12, values="zeros", exclusive=True, reverse=True),
        ],
        wrong=[Mutant("sum of the small parts", lambda x, dim, **_: 1 + torch.cumsum(x - 1, dim))],
        gradient_wrong=[Mutant("divides by zero factors", _by_division, "backward")],
    )
)
# PyTorch before 2.13 traces the gradient as a loop over all N factors: compiling it does not end
implement(scan, cumprod, compiled=() if torch.__version__ >= "2.13" else ("forward",))


@cumprod.function
def cumprod_function(
    x: Tensor, dim: int = -1, *, exclusive: bool = False, reverse: bool = False, dtype: dtype | None = None
) -> Tensor:
    """Running products along one dimension.

    Args:
        x, dim, exclusive, reverse, dtype: as of ``cumsum``; the first result of an exclusive one is 1.

    Returns:
        A tensor of x's shape and dtype (float32 under autocast, as PyTorch), multiplied in fp32 and rounded once. The same bits
        every time.

    Raises:
        TypeError, ValueError: as ``cumsum``.

    The gradient divides by nothing, so factors of 0 are exact and cost nothing, and it never waits for the GPU. A NaN in x
    makes NaN of the gradients it takes part in; PyTorch, which divides, of all in its row.
    """
    return scan_along(scan, x, dim, exclusive, reverse, dtype)
