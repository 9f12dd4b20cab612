"""Products of 16-bit matrices of odd sizes, or whose rows begin anywhere: cuBLAS falls to a quarter of its rate there, and TMA
does not take them. cuBLAS multiplies copies, filled up to multiples of 8, of what does not fit, and so is the result copied; or
Hopper's main loop stores rows that begin anywhere, and only operands are copied."""

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
TILE = 128  # rows and columns of the tiles in which cuBLAS multiplies where rows begin anywhere
# On an H200, of the main loop: multiplications that cost a microsecond more than cuBLAS's at aligned sizes, where TMA stores
# the result and where warps do; elements that warps store in one; elements of a result whose tiles occupy the GPU.
BY_TMA, BY_WARPS, STORES, FILLED = 4e9, 1.6e9, 2e6, 10**6


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


def copied(a: Tensor, b: Tensor, result: bool = True) -> list[int]:
    """Elements of each copy that a [.., M, K] times b [.., K, N] needs; of the ``result`` too unless what reads it takes longer
    rows."""
    m, n = a.shape[-2], b.shape[-1]
    results = a.shape[:-2].numel() * m * n
    operands = [alone(a).numel()] * (not whole(a)) + [alone(b).numel()] * (not (whole(b) and whole(b.mT)))
    return operands + [results] * (result and n % 8 > 0)


def multiplied(a: Tensor, b: Tensor) -> int:
    """Multiplications that cuBLAS takes the time of: whole tiles, in a batch one at least on each multiprocessor, since sums of
    batches are not split."""
    matrices = a.shape[:-2].numel()
    tiles = matrices * triton.cdiv(a.shape[-2], TILE) * triton.cdiv(b.shape[-1], TILE)
    return (tiles if matrices == 1 else max(tiles, MULTIPROCESSORS)) * TILE * TILE * a.shape[-1]


def copying(elements: list[int]) -> float:
    """Microseconds of copies of so many elements each."""
    return sum(elements) / COPIES + LAUNCH * len(elements)


def pays(a: Tensor, b: Tensor, result: bool = True) -> bool:
    """Whether copies are needed, and take less than what cuBLAS loses."""
    elements = copied(a, b, result)
    return bool(elements) and multiplied(a, b) / PRODUCTS > copying(elements)


def by_loop(a: Tensor, b: Tensor) -> bool:
    """Whether Hopper's main loop takes less than cuBLAS with copies and without. Times are beyond cuBLAS's at aligned sizes."""
    if a.dtype not in SIXTEEN_BITS or target_sm(a.device) != 90 or not (elements := copied(a, b)):
        return False
    (m, k), n, matrices = a.shape[-2:], b.shape[-1], a.shape[:-2].numel()
    if matrices * m * n < FILLED or (a.ndim == 3 and (n % 8 == 0 or 0 in (a.stride(0), b.stride(0)))):
        return False  # few tiles of long sums; batches with aligned results, or with one matrix for all, are cuBLAS's
    tiled = matrices * up_to(m, TILE if m <= TILE else 2 * TILE) * up_to(n, TILE)
    loop = copying([t.numel() for t in (a, b) if not fits(t)]) + LAUNCH
    loop += tiled * k / BY_WARPS + tiled / STORES if n % 8 else tiled * k / BY_TMA
    return loop < min(copying(elements), multiplied(a, b) / PRODUCTS)


class PaddedPlan:
    """c = a · b by cuBLAS for 16-bit a [.., M, K], b [.., K, N] with at most one batch dimension, and a contiguous c."""

    def __init__(self, a: Tensor, b: Tensor):
        k, self.n = up_to(a.shape[-1]), up_to(b.shape[-1])
        # columns of a stay columns where the result is cut in any case
        rows = up_to(a.shape[-2]) if across(a, -1) and self.n != b.shape[-1] else a.shape[-2]
        self.of_a = None if whole(a) else (rows, k)
        self.of_b = None if whole(b) and whole(b.mT) else (k, self.n)

    def operands(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Filled up."""
        return _filled(a, self.of_a), _filled(b, self.of_b)

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        product, c = torch.mm if a.ndim == 2 else torch.bmm, c.view(*a.shape[:-1], c.shape[-1])
        a, b = self.operands(a, b)
        if self.n == c.shape[-1]:
            product(a, b, out=c)
        else:
            copy(product(a, b), c)


def _filled(t: Tensor, sizes: tuple[int, int] | None) -> Tensor:
    """A copy of these sizes that ends with zeros, contiguous along the same dimension where its size is a multiple of 8; None
    for t itself."""
    if sizes is None:
        return t
    one, turned = alone(t), across(t, -1) and sizes[0] % 8 == 0
    made = copied_to(one.mT, *reversed(sizes)).mT if turned else copied_to(one, *sizes)
    return made.expand(*t.shape[:-2], *sizes)


class LoopPlan:
    """The same by Hopper's main loop, which stores rows of c that begin anywhere."""

    def __init__(self, a: Tensor, b: Tensor):
        self.launch = HopperPlan(fitting(a, "meta"), fitting(b, "meta"), loose=True, device=a.device)

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        self.launch(fitting(a), fitting(b), c)


def fitting(t: Tensor, device: str | None = None) -> Tensor:
    """The matrices, or a copy of them, with rows that begin on 16 bytes, contiguous along the same dimension; those of a copy
    begin on lines of 128. On another ``device``: empty ones."""
    if fits(t):
        return t if device is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    rows = t.mT if across(t, -1) else t
    columns = rows.shape[-1]
    made = torch.empty(
        (*rows.shape[:-1], up_to(columns, 128 // t.element_size())), dtype=t.dtype, device=device or t.device
    )
    if device is None:
        copy(rows, made)
    made = made[..., :columns]
    return made.mT if across(t, -1) else made
