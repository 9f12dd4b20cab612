"""``logcumsumexp(x, dim=-1)``: log of running sums of exponentials, without overflow."""

from typing import Any

import torch
from torch import Tensor

from weft.definition import Mutant, Operator, Tolerance
from weft.operators import mutants
from weft.operators.scan import kernels
from weft.operators.scan.dispatch import ColumnsKernel, RowsKernel, Scan
from weft.operators.scan.kernels import Formula
from weft.operators.scan.scan import define, implement, scan_along

# TEAMS, WARPS, VECTORS, ADDERS, PER_SM, as dispatch.RINGS; adders take exponentials, so there are more of them.
RINGS = ((2, 8, 4, 8, 1), (3, 8, 4, 4, 1), (1, 16, 4, 4, 1))
WIDE = (2, 8, 8, 4, 1)  # of float32, whose exponentials take no more room than the elements

scan = Scan(
    "logcumsumexp",
    torch.logcumsumexp,
    Formula("logcumsumexp", kernels.running_logsumexp, kernels.total_logsumexp, kernels.log_plus, -float("inf")),
    # a thread holds its exponentials, of 32 bits each: of 16-bit elements half as many as of a sum's
    RowsKernel("Logarithm<{}>", (128, 64), 64, rings=((WIDE, *RINGS), RINGS), short=2**16),
    ColumnsKernel("logarithm_columns.cu", "log_columns<{}", across=(16, 8), held=(128, 64)),
    log=True,
)


def _forward_scale(arguments: dict[str, Any], _: Any) -> list[Tensor]:
    """A logarithm near 0 is rounded as the 1 + ... it is taken of."""
    return [torch.ones_like(arguments["x"])]


def _backward_scale(arguments: dict[str, Any], gradients: list[Tensor]) -> list[Tensor]:
    """As large as the gradient would be without signs: it is a sum of terms that may cancel."""
    leaf = arguments["x"].detach().requires_grad_()
    with torch.enable_grad():
        y = scan.reference(leaf, arguments["dim"], arguments["exclusive"], arguments["reverse"])
        return list(torch.autograd.grad(y, leaf, gradients[0].abs()))


def _of_tile_maximum(x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Relative to the largest of the row, below which small terms vanish."""
    base = x.amax(dim, keepdim=True) + 80 if x.numel() else x
    return (torch.cumsum((x - base).exp(), dim).log() + base).to(x.dtype)


logcumsumexp = Operator(
    **define(
        scan,
        {
            "forward": Tolerance(scale=_forward_scale, ulps=2, terms=lambda w: 256),
            "backward": Tolerance(scale=_backward_scale, ulps=4, terms=lambda w: 256),
        },
        flops=8,
        special_ops=2,
        wrong=[
            Mutant("terms one per cent larger", mutants.changed(scan.reference, x=lambda x: (x * 1.01).to(x.dtype))),
            Mutant("relative to the largest of all", _of_tile_maximum),
        ],
        gradient_wrong=[
            Mutant("of the last result alone", lambda dy, x, dim, **_: (torch.softmax(x, dim) * dy,), "backward")
        ],
    )
)
implement(scan, logcumsumexp)


@logcumsumexp.function
def logcumsumexp_function(x: Tensor, dim: int = -1, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Logarithms of running sums of exponentials along one dimension.

    Args:
        x, dim, exclusive, reverse: as of ``cumsum``; the first result of an exclusive one is -inf.

    Returns:
        A tensor of x's shape and dtype, computed in fp32 and rounded once. The same bits every time. No finite input overflows.
        The gradient takes the result as it was rounded, as PyTorch's does, and errs by factors of up to e^(2⁻⁹·|y|) in bfloat16
        and e^(2⁻¹²·|y|) in float16: where results are large, ``x.float()`` serves.

    Raises:
        TypeError, ValueError: as ``cumsum``.
    """
    return scan_along(scan, x, dim, exclusive, reverse)
