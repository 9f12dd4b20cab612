"""Products of matrices whose rows begin anywhere, which TMA does not take: what does not fit is copied to rows that begin on 16
bytes, and so is the result. cuBLAS falls to a quarter of its rate there."""

import torch
from torch import Tensor

from weft.operators.hopper.gemm import HopperPlan, across, why_not
from weft.operators.hopper.tensor_maps import map_why_not

NOTHING = "rows begin on 16 bytes: nothing needs a copy"
# Multiplications that copies save a microsecond of, elements copied in a microsecond, and launches, µs: estimates for an H100.
PRODUCTS, COPIES, LAUNCHES = 1e8, 5e5, 10.0


def fits(t: Tensor) -> bool:
    return not map_why_not("", t, t.element_size(), across(t, -1))


def fitting(t: Tensor, device: torch.device | str | None = None) -> Tensor:
    """An empty matrix of t's shape and contiguous dimension whose rows begin on 16 bytes."""
    turned, step = across(t, -1), 16 // t.element_size()
    rows, columns = reversed(t.shape) if turned else t.shape
    made = torch.empty((rows, -(-columns // step) * step), dtype=t.dtype, device=device or t.device)[:, :columns]
    return made.t() if turned else made


def form(t: Tensor) -> Tensor:
    """What stands for a matrix: itself, or where TMA does not take it the form of its copy."""
    return t if fits(t) else fitting(t, "meta")


def copied(a: Tensor, b: Tensor) -> int:
    """Elements that are copied for a [M, K] times b [K, N]."""
    m, n = a.shape[0], b.shape[1]
    return sum(t.numel() for t in (a, b) if not fits(t)) + (m * n if n % 8 else 0)


def pays(a: Tensor, b: Tensor) -> bool:
    """Whether the copies take less than what cuBLAS loses."""
    m, k, n = *a.shape, b.shape[1]
    return m * n * k / PRODUCTS > copied(a, b) / COPIES + LAUNCHES


def unsupported(a: Tensor, b: Tensor) -> str:
    """Why the copies cannot be multiplied ("" when they can)."""
    return why_not(form(a), form(b), a.dtype, -(-b.shape[1] // 8) * 8)


class PaddedPlan:
    """The launch of c = a · b for 16-bit a [M, K], b [K, N] and a contiguous c [M, N]."""

    def __init__(self, a: Tensor, b: Tensor):
        self.columns = -(-b.shape[1] // 8) * 8
        self.plan = HopperPlan(form(a), form(b), n=self.columns, device=a.device)

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        a, b = (t if fits(t) else fitting(t).copy_(t) for t in (a, b))
        if self.columns == c.shape[1]:
            self.plan(a, b, c)
            return
        wide = torch.empty((c.shape[0], self.columns), dtype=c.dtype, device=c.device)
        self.plan(a, b, wide)
        c.copy_(wide[:, : c.shape[1]])
