"""Products of 16-bit matrices of odd sizes, or whose rows begin anywhere: cuBLAS falls to a quarter of its rate there, and TMA
does not take them. What does not fit is copied to rows that begin on 16 bytes. Large products are Hopper's main loop's, which
stores rows that begin anywhere; results of cuBLAS's are copied too."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.hopper.gemm import SIXTEEN_BITS, HopperPlan, across
from weft.operators.hopper.tensor_maps import map_why_not
from weft.operators.hopper.tile_sizes import MULTIPROCESSORS
from weft.operators.launch import Plan, Plans, target_sm

NOTHING = "sizes are multiples of 8 and rows begin on 16 bytes: nothing needs a copy"
# On an H200: multiplications in a microsecond that aligned rows save, elements copied in one, and a copy's launch in µs.
PRODUCTS, COPIES, LAUNCH = 8e7, 8e5, 3.0
# multiplications below which cuBLAS was ahead of our loop wherever it was measured on an H200, by up to three times where
# K is long and tiles are few
SMALL = 4e9
TILE = 128  # rows and columns of the tiles in which cuBLAS multiplies where rows begin anywhere


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
def _copies(x: Tensor, y: Tensor) -> Plan:
    (matrices, m, n), (into, rows, columns) = x.shape, y.shape
    if matrices != into:
        raise ValueError(f"a copy of {matrices} matrices into {into}")
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
    _copies.of((x, y))(x, y)


def up_to(size: int, step: int = 8) -> int:
    return -(-size // step) * step


def fits(t: Tensor) -> bool:
    return not map_why_not("", t, t.element_size(), across(t, -1))


def alone(t: Tensor) -> Tensor:
    """The one matrix of a batch that is the same for all."""
    return t[0] if t.ndim == 3 and t.stride(0) == 0 else t


def whole(t: Tensor) -> bool:
    """Whether cuBLAS is fast with it as a left operand: rows begin on 16 bytes, and 8 divides their length."""
    return fits(t) and t.shape[-1] % 8 == 0


def by_loop(a: Tensor, b: Tensor) -> bool:
    """Whether Hopper's main loop multiplies what a copy helps. Batches only where cuBLAS's result would be copied."""
    if a.dtype not in SIXTEEN_BITS or target_sm(a.device) != 90 or a.numel() * b.shape[-1] < SMALL:
        return False
    return a.ndim == 2 or (b.shape[-1] % 8 > 0 and 0 not in (a.stride(0), b.stride(0)))


def copied(a: Tensor, b: Tensor) -> list[int]:
    """Elements of each copy that a [.., M, K] times b [.., K, N] needs."""
    if by_loop(a, b):
        return [t.numel() for t in (a, b) if not fits(t)]
    m, n = a.shape[-2], b.shape[-1]
    results = a.shape[:-2].numel() * m * n
    operands = [alone(a).numel()] * (not whole(a)) + [alone(b).numel()] * (not (whole(b) and whole(b.mT)))
    return operands + [results] * (n % 8 > 0)


def needed(a: Tensor, b: Tensor) -> bool:
    return bool(copied(a, b)) or (b.shape[-1] % 8 > 0 and by_loop(a, b))


def multiplied(a: Tensor, b: Tensor) -> int:
    """Multiplications that cuBLAS takes the time of: whole tiles, in a batch one at least on each multiprocessor, since sums of
    batches are not split."""
    matrices = a.shape[:-2].numel()
    tiles = matrices * triton.cdiv(a.shape[-2], TILE) * triton.cdiv(b.shape[-1], TILE)
    return (tiles if matrices == 1 else max(tiles, MULTIPROCESSORS)) * TILE * TILE * a.shape[-1]


def pays(a: Tensor, b: Tensor) -> bool:
    """Whether copies, or the main loop's stores, are needed, and take less than what cuBLAS loses."""
    elements = copied(a, b)
    return needed(a, b) and multiplied(a, b) / PRODUCTS > sum(elements) / COPIES + LAUNCH * len(elements)


class PaddedPlan:
    """c = a · b for 16-bit a [.., M, K], b [.., K, N] with at most one batch dimension, and a contiguous c. ``cublas``: by that
    in any case."""

    def __init__(self, a: Tensor, b: Tensor, *, cublas: bool = False):
        k, self.n = up_to(a.shape[-1]), up_to(b.shape[-1])
        self.loop = not cublas and by_loop(a, b)
        # columns of a stay columns where the result is cut in any case
        rows = up_to(a.shape[-2]) if across(a, -1) and self.n != b.shape[-1] else a.shape[-2]
        self.of_a = None if (fits if self.loop else whole)(a) else (rows, k)
        self.of_b = None if (fits(b) if self.loop else whole(b) and whole(b.mT)) else (k, self.n)
        if self.loop:
            self.launch = HopperPlan(*self.operands(a, b, "meta"), loose=True, device=a.device)

    def operands(self, a: Tensor, b: Tensor, device: str | None = None) -> tuple[Tensor, Tensor]:
        """Filled up; the main loop's are views of that without what was filled in. On another ``device``: empty ones."""
        (m, k), n = a.shape[-2:], b.shape[-1]
        a, b = _filled(a, self.of_a, device), _filled(b, self.of_b, device)
        return (a[..., :m, :k], b[..., :k, :n]) if self.loop else (a, b)

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        product, c = torch.mm if a.ndim == 2 else torch.bmm, c.view(*a.shape[:-1], c.shape[-1])
        a, b = self.operands(a, b)
        if self.loop:
            self.launch(a, b, c)
        elif self.n == c.shape[-1]:
            product(a, b, out=c)
        else:
            copy(product(a, b), c)


def fitting(t: Tensor) -> Tensor:
    """The matrix with rows that begin on 16 bytes."""
    return t if fits(t) else copied_to(t, t.shape[0], up_to(t.shape[1]))[:, : t.shape[1]]


def _filled(t: Tensor, sizes: tuple[int, int] | None, device: str | None = None) -> Tensor:
    """A copy of these sizes that ends with zeros, contiguous along the same dimension where its size is a multiple of 8; None
    for t itself. On another ``device``: an empty one."""
    if sizes is None:
        return t if device is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    one, turned = alone(t), across(t, -1) and sizes[0] % 8 == 0
    one, into = (one.mT, sizes[::-1]) if turned else (one, sizes)
    made = torch.empty((*one.shape[:-2], *into), dtype=t.dtype, device=device or t.device)
    if device is None:
        copy(one, made)
    return (made.mT if turned else made).expand(*t.shape[:-2], *sizes)
