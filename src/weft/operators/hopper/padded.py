"""Products of matrices whose rows begin anywhere, which TMA does not take: what does not fit is copied to rows that begin on 16
bytes, and so is the result. cuBLAS falls to a quarter of its rate there."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.hopper.gemm import HopperPlan, across, why_not
from weft.operators.hopper.tensor_maps import map_why_not
from weft.operators.launch import Plan, Plans

NOTHING = "rows begin on 16 bytes: nothing needs a copy"
# On an H200: multiplications in a microsecond that aligned rows save, elements copied in one, and a copy's launch in µs.
PRODUCTS, COPIES, LAUNCH = 8e7, 8e5, 3.0


@triton.jit
def copy_padded(
    x_ptr, y_ptr, M, N, rows, columns, x_matrix, x_row, x_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """y [matrices, rows, columns] = x [matrices, M, N] of any strides, cut off or with zeros after it."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tiles = tl.cdiv(rows, BLOCK_M) * tiles_n
    matrix, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    m = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    x = x_ptr + matrix * x_matrix + m.to(tl.int64) * x_row + n.to(tl.int64) * x_col
    y = y_ptr + (matrix * rows + m) * columns + n
    tl.store(y, tl.load(x, mask=(m < M) & (n < N), other=0.0), mask=(m < rows) & (n < columns))


@Plans
def _copies(x: Tensor, rows: int, columns: int) -> Plan:
    matrices, m, n = x.shape
    tile = (64, 64) if across(x, -1) else (16, 256)
    grid = (matrices * math.prod(triton.cdiv(*sizes) for sizes in zip((rows, columns), tile, strict=True)),)
    scalars = (m, n, rows, columns, *x.stride())
    return Plan(copy_padded, grid, scalars, dict(zip(("BLOCK_M", "BLOCK_N"), tile, strict=True)))


def copied_to(t: Tensor, rows: int, columns: int) -> Tensor:
    """A contiguous copy [.., rows, columns] of [.., M, N], cut off or with zeros after it."""
    made = torch.empty((*t.shape[:-2], rows, columns), dtype=t.dtype, device=t.device)
    copy(t, made)
    return made


def copy(x: Tensor, y: Tensor) -> None:
    """Writes x [.., M, N] into a contiguous y [.., rows, columns], cut off or with zeros after it."""
    if not y.numel():
        return
    x, y = (u.reshape(-1, *u.shape[-2:]) for u in (x, y))
    if x.element_size() == 1:
        x, y = x.view(torch.uint8), y.view(torch.uint8)
    _copies.of((x,), *y.shape[1:])(x, y)


def up_to(size: int, step: int = 8) -> int:
    return -(-size // step) * step


def fits(t: Tensor) -> bool:
    return not map_why_not("", t, t.element_size(), across(t, -1))


def alone(t: Tensor) -> Tensor:
    """The one matrix of a batch that is the same for all."""
    return t[0] if t.ndim == 3 and t.stride(0) == 0 else t


def fitting(t: Tensor, device: torch.device | str | None = None) -> Tensor:
    """An empty matrix, or batch of them, of t's shape and contiguous dimension whose rows begin on 16 bytes."""
    turned = across(t, -1)
    *batch, rows, columns = (t.mT if turned else t).shape
    wide = up_to(columns, 16 // t.element_size())
    made = torch.empty((*batch, rows, wide), dtype=t.dtype, device=device or t.device)[..., :columns]
    return made.mT if turned else made


def fitted(t: Tensor) -> Tensor:
    """A matrix, or batch of them, that TMA takes: t itself, or its copy in the form of :func:`fitting`."""
    if fits(t):
        return t
    if (one := alone(t)) is not t:
        return fitted(one).expand(t.shape)
    if across(t, -1):
        return fitted(t.mT).mT
    rows, columns = t.shape[-2:]
    return copied_to(t, rows, up_to(columns, 16 // t.element_size()))[..., :columns]


def form(t: Tensor) -> Tensor:
    """What stands for a matrix: itself, or where TMA does not take it the form of its copy."""
    return t if fits(t) else fitting(alone(t), "meta").expand(t.shape)


def copied(a: Tensor, b: Tensor) -> list[int]:
    """Elements of each copy that a [.., M, K] times b [.., K, N] needs."""
    m, n = a.shape[-2], b.shape[-1]
    results = a.shape[:-2].numel() * m * n
    return [alone(t).numel() for t in (a, b) if not fits(t)] + ([results] if n % 8 else [])


def pays(a: Tensor, b: Tensor) -> bool:
    """Whether copies are needed, and take less than what cuBLAS loses."""
    elements = copied(a, b)
    return bool(elements) and a.numel() * b.shape[-1] / PRODUCTS > sum(elements) / COPIES + LAUNCH * len(elements)


def unsupported(a: Tensor, b: Tensor) -> str:
    """Why the copies cannot be multiplied ("" when they can)."""
    return why_not(form(a), form(b), a.dtype, up_to(b.shape[-1]))


class PaddedPlan:
    """The launch of c = a · b for 16-bit a [.., M, K], b [.., K, N] with at most one batch dimension, and a contiguous c."""

    def __init__(self, a: Tensor, b: Tensor):
        self.columns = up_to(b.shape[-1])
        self.plan = HopperPlan(form(a), form(b), n=self.columns, device=a.device)

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        a, b = fitted(a), fitted(b)
        if self.columns == c.shape[-1]:
            self.plan(a, b, c)
            return
        wide = torch.empty((*c.shape[:-1], self.columns), dtype=c.dtype, device=c.device)
        self.plan(a, b, wide)
        copy(wide, c)
