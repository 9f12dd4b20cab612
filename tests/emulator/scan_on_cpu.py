"""For tests of logarithms of running sums whose kernels are emulated on a CPU: numbers, and how far off a result may be."""

import torch
from cuda_on_cpu import difference

INF, NAN = float("inf"), float("nan")


def far_apart(x: torch.Tensor) -> None:
    """Numbers whose exponentials no float holds beside each other, low ones first and later ones low."""
    x.mul_(150).add_(torch.arange(x.shape[1]).div(x.shape[1] / 500).sub(700))
    x[:, x.shape[1] // 2 :].sub_(900)


def low_ends(x: torch.Tensor) -> None:
    """Of every other row, an element alone far below all others at either end."""
    x[1::2, [0, -1]] = -200


def a_step(x: torch.Tensor) -> None:
    """A half far below the other."""
    x[:, x.shape[1] // 2 :].add_(300)


def not_finite(x: torch.Tensor) -> None:
    """A row of nothing, one that begins so, infinities and a NaN."""
    x[0] = -INF
    x[1, :45] = -INF
    x[2, 30], x[2, 90], x[2, 200] = INF, INF, -INF
    x[3, 100] = NAN
    x[4, 150], x[4, 180] = INF, NAN


def huge(x: torch.Tensor) -> None:
    """As far from 0 as 32 bits, or those of a bfloat16, go."""
    x.sign_().mul_(3e38)
    x[0] = 3e38
    x[1] = -3e38


def grows(x: torch.Tensor) -> None:
    """Factors of which a part's product is more than a float holds, behind a 0, a tiny one, one that lets it shrink again."""
    x.div_(64).add_(1.6)
    x[0::4, 3] = 0
    x[1::4, 1] = 1e-30
    x[2::4, 100:] = 0.6


VALUES = {"normal": lambda x: x.mul_(3), "near one": lambda x: x.div_(64).add_(1), "grows": grows,
          "far apart": far_apart, "low ends": low_ends, "a step": a_step, "not finite": not_finite, "huge": huge}  # fmt: skip


def further_off_than_a_logarithm(got: torch.Tensor, want: torch.Tensor) -> str:
    """An empty string, or where a result is further off than the operator allows of its least."""
    ulp = torch.finfo(got.dtype).eps
    limit = (ulp / 2 if ulp > 1e-6 else 8 * ulp) * want.abs().clamp(min=1) + 2e-6
    return difference("y", got, torch.where(got == want.to(got.dtype), got.double(), want), limit)


def recurrence(x, y, dy, spans, *, log: bool, exclusive: bool, reverse: bool) -> tuple[torch.Tensor, ...]:
    """The gradient of a product or of a logarithm of sums of rows, in float64, one element after the other.

    Args:
        spans: of parts (first, end), counted in the order of the recurrence.

    Returns:
        dx; and of each part the r before it, its scale and total: r -> scale * r + total.
    """
    rows, n = x.shape
    x, y, dy = (t.double() if reverse else t.double().flip(1) for t in (x, y, dy))

    def look(t: torch.Tensor, by: int, other: float) -> torch.Tensor:
        """Of each element the one that lies ``by`` before it in the order of the recurrence."""
        if by < 0:
            return torch.cat([t[:, -by:], torch.full((rows, -by), other, dtype=t.dtype)], 1)
        return torch.cat([torch.full((rows, by), other, dtype=t.dtype), t[:, : n - by]], 1)

    b = look(dy, int(exclusive), 0.0)
    if log:
        near, far = look(y, int(exclusive), INF), look(y, exclusive + 1, INF)
        a, factor = torch.where(near == far, 1.0, (near - far).exp()), (x - near).exp()
    else:
        a, factor = look(x, 1, 1.0), look(y, exclusive - 1, 1.0)
    r, before = torch.zeros(rows, dtype=torch.float64), []
    for at in range(n):
        before.append(r)
        r = a[:, at] * r + b[:, at]
    all_before = torch.stack([*before, r], 1)
    dx = factor * all_before[:, 1:]
    carry = torch.stack([all_before[:, first] for first, _ in spans], 1)
    scales = torch.stack([a[:, first:last].prod(1) for first, last in spans], 1)
    totals = torch.stack([all_before[:, last] for _, last in spans], 1) - scales * carry
    return dx if reverse else dx.flip(1), carry, scales, totals
