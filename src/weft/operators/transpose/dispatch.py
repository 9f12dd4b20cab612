"""Which kernel a transpose takes, and how it is launched."""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.checks import check_dim, check_shape, check_tensor
from weft.operators.configs import Config, Configurations, bucket, grid_of, tiles
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING, Plan
from weft.operators.matmul.kernels import in_bands

VECTORS, WINDOWS = Path(__file__).parent / "vectors.cu", Path(__file__).parent / "windows.cu"
CUDA_FROM = 2**20  # elements from which the CUDA C++ kernels are chosen: below, launching is what counts
SMALL_MATRIX = 1024  # elements up to which several matrices share a program
TILE = 4096  # elements of a tile of several matrices, or of one that the matrix makes narrower than configured
SIZES = (2**20, 2**24, 2**28)  # elements: tensors of up to so many share a configuration
SECTOR_BYTES = 32
SCATTERED = "the leading dimensions do not collapse into two of one stride each"
SHARED_BYTES = 48 * 1024  # of a tile at most, so that a multiprocessor holds several


@dataclass(frozen=True)
class Matrices:
    """``B0 * B1`` matrices of M rows and N columns; strides in elements.

    Two batch axes, not one: attention's keys [batch, head, length, dim], a view of [batch, length, head, dim], have no one
    batch stride.
    """

    B0: int
    B1: int
    M: int
    N: int
    b0: int
    b1: int
    row: int
    col: int

    @property
    def batch(self) -> int:
        return self.B0 * self.B1


def matrices_of(x: Tensor) -> Matrices | None:
    """x [..., M, N] as matrices, or None where its leading dimensions do not collapse into two of one stride each."""
    axes: list[tuple[int, int]] = []  # (size, stride), innermost first
    for size, stride in zip(reversed(x.shape[:-2]), reversed(x.stride()[:-2]), strict=True):
        if size == 1:
            continue
        if axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (size * axes[-1][0], axes[-1][1])
        else:
            axes.append((size, stride))
    if len(axes) > 2:
        return None
    (n1, s1), (n0, s0) = (*axes, (1, 0), (1, 0))[:2]
    return Matrices(n0, n1, x.shape[-2], x.shape[-1], s0, s1, x.stride(-2), x.stride(-1))


class TransposeCall(Call):
    """Raises TypeError or ValueError unless x has the two axes that are given. ``last``: they are its last two."""

    def __init__(self, x: Tensor, dim0: int = -2, dim1: int = -1):
        check_tensor("transpose", "x", x)
        check_shape("transpose", "x", x, x.ndim >= 2, "at least 2 dimensions")
        found = check_dim("transpose", dim0, x.ndim), check_dim("transpose", dim1, x.ndim)
        self.x, self.last = x, sorted(found) == [x.ndim - 2, x.ndim - 1]

    @functools.cached_property
    def matrices(self) -> Any:  # where it is None, no route with a launch supports the call
        return matrices_of(self.x)

    @property
    def plain_copy(self) -> bool:
        """Whether elements that follow each other in y do so in x."""
        return 1 in (self.matrices.M, self.matrices.N) or self.matrices.row == 1

    @property
    def large(self) -> bool:
        """Whether the CUDA C++ kernels are worth it: whole lines of 128 bytes on both sides, and many of them."""
        lines = min(self.matrices.M, self.matrices.N) * self.x.element_size() >= 128
        return lines and self.x.numel() >= CUDA_FROM and not INTERPRETING

    @property
    def small(self) -> bool:
        m = self.matrices
        return m.M * m.N <= SMALL_MATRIX and m.batch > 1

    @property
    def narrow(self) -> bool:
        """Whether a column is one or two vectors of y, while rows of x begin anywhere."""
        m = self.matrices
        return m.M * self.x.element_size() in (16, 32) and m.M * m.N < 2**31 - 2**11 and no_vectors(self) != ""

    @property
    def size_class(self) -> int:
        """The part of a configuration's key that says how large the tensor is."""
        return next((n for n in SIZES if self.x.numel() <= n), SIZES[-1])


def scattered(c: TransposeCall) -> str:
    return "" if c.matrices else f"{SCATTERED}, so a copy would be needed"


def no_adjacent_columns(c: TransposeCall) -> str:
    """Why x cannot be read by words of 4 bytes (an empty string when it can)."""
    if not c.matrices or c.matrices.col == 1:
        return scattered(c)
    return f"columns {c.matrices.col} elements apart; words of 4 bytes need adjacent ones"


def no_vectors(c: TransposeCall) -> str:
    """Why x cannot be moved 16 bytes at a time on both sides (an empty string when it can)."""
    m, k = c.matrices, 16 // c.x.element_size()
    if m is None:
        return scattered(c)
    if m.col != 1:
        return f"columns {m.col} elements apart; 16-byte accesses need adjacent ones"
    if m.M % k or m.N % k:
        return f"{m.M} x {m.N}; blocks of 16 bytes on both sides need multiples of {k}"
    if m.row % k or m.b0 % k or m.b1 % k or not pointer_aligned(c.x):
        return "rows that do not begin on 16 bytes"
    return ""


# ---- vectors.cu ------------------------------------------------------------------------------------------------------


def vectors_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """128 bytes of a row on both sides (256 for 32 bits, so that a block has 256 threads); bands of 4 KiB of rows of y."""
    return {"SHARED": 1, "R": 64, "C": 64, "EACH": 1, "GROUP": 64 // dtype.itemsize, "DIAGONAL": 0}


def vectors_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    k = 16 // dtype.itemsize
    orders = grid_of({"GROUP": (1, 4, 8, 16, 32, 64), "DIAGONAL": (0, 1)})
    orders = [o for o in orders if not o["DIAGONAL"] or o["GROUP"] in (1, 16)]
    for c in grid_of({"R": (8 * k, 16 * k, 32 * k), "C": (8 * k, 16 * k, 32 * k), "EACH": (1, 2)}):
        threads = c["R"] // k * c["C"] // k // c["EACH"]
        if 64 <= threads <= 512 and c["R"] * c["C"] * dtype.itemsize <= SHARED_BYTES:
            yield from ({"SHARED": 1, **c, **order} for order in orders)
    for across in (8, 16, 32):
        yield from ({"SHARED": 0, "R": 8 * k, "C": across * k, "EACH": 1, **order} for order in orders)


vectors_configuration = Configurations(__file__, "transpose_vectors", vectors_heuristic, vectors_candidates)


def vectors_plan(c: TransposeCall) -> CudaPlan:
    m, config = c.matrices, vectors_configuration(c.x.device, c.x.dtype, c.size_class)
    r, cols = config["R"], config["C"]
    k = 16 // c.x.element_size()
    threads = r // k * cols // k // config["EACH"]
    kernel = "transpose_shared" if config["SHARED"] else "transpose_registers"
    kernel = f"{kernel}<{CTYPES[c.x.dtype]}, {r}, {cols}, {config['EACH']}>"
    scalars = (*_sizes(m), ctypes.c_int(config["GROUP"]), ctypes.c_int(config["DIAGONAL"]))
    return CudaPlan(VECTORS, kernel, (m.batch * -(-m.M // r) * -(-m.N // cols), 1), threads, scalars)


def _sizes(m: Matrices) -> tuple[Any, ...]:
    return tuple(ctypes.c_longlong(v) for v in (m.M, m.N, m.B1, m.b0, m.b1, m.row))


# ---- windows.cu ------------------------------------------------------------------------------------------------------


def windows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """256 bytes of each row of x, 128 elements of each row of y: what a block reads beyond its tile (a sector's worth of rows,
    a sector of each row) is then a quarter of it or less. Bands as high as are best for vectors.cu in large matrices."""
    return {"R": 128, "C": 256 // dtype.itemsize, "THREADS": 256, "GROUP": 64}


def windows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    line = 128 // dtype.itemsize
    tiles = {"R": (64, 128, 256), "C": (line, 2 * line, 4 * line), "THREADS": (256, 512)}
    for c in grid_of({**tiles, "GROUP": (1, 8, 32, 64)}):
        across, warps = c["R"] // line, c["THREADS"] // 32  # warps side by side along a row of y, of all
        shares = across and warps % (2 * across) == 0 and c["C"] % (4 * warps // across) == 0
        if shares and shared_bytes(c, c["C"] + 5, dtype) <= SHARED_BYTES:
            yield c


windows_configuration = Configurations(__file__, "transpose_windows", windows_heuristic, windows_candidates)


def pitch_and_step(dtype: torch.dtype, c: int, m: int, x_row: int) -> tuple[int, int]:
    """How many elements rows of the tile are apart in shared memory, and how many columns the four rows of y are apart that
    a warp writes together.

    Lane (v, j) reads row r(j) + v K of column j STEP. Windows of neighbouring columns begin M elements apart, so r(j) falls by
    M STEP j but for whole vectors, and the lane's address is v K PITCH + j STEP (1 - M PITCH) but for K PITCH times whole
    numbers. The 8 v are 4 words times an odd number apart, or 8 words where PITCH must be even (two lanes to a bank then):
    all multiples of 4 words. So the four j must be different modulo 4 words.
    """
    if dtype == torch.float32:  # PITCH and M odd: two lanes to a bank, if M PITCH is 3 modulo 4
        wanted, step = {3 * m % 4} if m % 2 else {1, 3}, 1
    else:  # STEP (1 - M PITCH) is to be 2 modulo 4: two elements to a word
        c += 2
        if x_row % 2 == 0:
            wanted, step = {2}, 2
        elif m % 2:
            wanted, step = {3 * m % 4}, 1
        else:
            wanted, step = {1, 3}, 2
    return next(p for p in range(c, c + 4) if p % 4 in wanted), step


def shared_bytes(config: Config, pitch: int, dtype: torch.dtype) -> int:
    rows = config["R"] + SECTOR_BYTES // dtype.itemsize - 1
    return -(-(rows * pitch + 2) * dtype.itemsize // 16) * 16


def windows_plan(c: TransposeCall) -> CudaPlan:
    x, m, config = c.x, c.matrices, windows_configuration(c.x.device, c.x.dtype, c.size_class)
    r, cols, threads = config["R"], config["C"], config["THREADS"]
    tiles_m, tiles_n = -(-(m.M + SECTOR_BYTES // x.element_size() - 1) // r), -(-m.N // cols)
    bands = -(-tiles_m // config["GROUP"])
    group = -(-tiles_m // bands)  # of equal height: a last one of few rows would have nothing to share
    pitch, step = pitch_and_step(x.dtype, cols, m.M, m.row)
    kernel = f"transpose_windows<{CTYPES[x.dtype]}, {r}, {cols}, {pitch}, {step}, {threads}>"
    scalars = (*_sizes(m), *(ctypes.c_uint(v) for v in (tiles_n, group, bands)))
    blocks = m.batch * bands * group * tiles_n
    return CudaPlan(WINDOWS, kernel, (blocks, 1), threads, scalars, shared_bytes=shared_bytes(config, pitch, x.dtype))


# ---- Triton -----------------------------------------------------------------------------------------------------------


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP: tl.constexpr, DIAGONAL: tl.constexpr):
    """Which tile a program of one matrix takes: (tile row, tile column).

    Programs that run at the same time have neighbouring numbers. In bands of GROUP tile rows, walked down and then right,
    they share the rows of x *and* the rows of y that they touch: GROUP=1 walks along the rows of x, a large one along
    those of y. DIAGONAL shifts every tile row by one tile more, so that neighbours differ in both.
    """
    m, n = in_bands(program, tiles_m, tiles_n, GROUP)
    if DIAGONAL:
        n = (n + m) % tiles_n
    return m, n


@triton.jit
def transpose_tiles(
    x_ptr, y_ptr, M, N, B1, x_b0, x_b1, x_row, x_col,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """y[b, n, m] = x[b, m, n]. x: matrices of any strides; y: contiguous. One program moves R rows and C columns of x.

    EVEN says that tiles fill the matrix: loads then need no predicate (with a cache hint, one costs a branch).
    """
    tiles_m, tiles_n = tl.cdiv(M, R), tl.cdiv(N, C)
    b = tl.program_id(0) // (tiles_m * tiles_n)
    tile_m, tile_n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP, DIAGONAL)
    row = tile_m.to(tl.int64) * R + tl.arange(0, R)  # int64: tensors may hold more than 2**31 elements
    col = tile_n.to(tl.int64) * C + tl.arange(0, C)
    x_ptr += (b // B1).to(tl.int64) * x_b0 + (b % B1).to(tl.int64) * x_b1
    y_ptr += b.to(tl.int64) * M * N
    x_at = x_ptr + row[:, None] * x_row + col[None, :] * x_col
    y_at = y_ptr + col[:, None] * M + row[None, :]
    if EVEN:
        x = tl.load(x_at, eviction_policy="evict_last")  # the hint: docs/notes/softmax.md
        tl.store(y_at, tl.trans(x))
    else:
        x = tl.load(x_at, mask=(row < M)[:, None] & (col < N)[None, :], eviction_policy="evict_last")
        tl.store(y_at, tl.trans(x), mask=(col < N)[:, None] & (row < M)[None, :])


@triton.jit
def transpose_small(
    x_ptr, y_ptr, B, M, N, B1, x_b0, x_b1, x_row, x_col, BB: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The same for matrices smaller than a tile: one program moves BB whole ones."""
    b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)[:, None, None]
    row, col = tl.arange(0, R), tl.arange(0, C)
    x_at = x_ptr + (b // B1) * x_b0 + (b % B1) * x_b1 + row[None, :, None] * x_row + col[None, None, :] * x_col
    x = tl.load(x_at, mask=(b < B) & (row < M)[None, :, None] & (col < N)[None, None, :], eviction_policy="evict_last")
    y_at = y_ptr + b * M * N + col[None, :, None] * M + row[None, None, :]
    inside = (b < B) & (col < N)[None, :, None] & (row < M)[None, None, :]
    tl.store(y_at, tl.permute(x, (0, 2, 1)), mask=inside)


@triton.jit
def transpose_narrow(x_ptr, y_ptr, N, B1, x_b0, x_b1, x_row, x_col, M: tl.constexpr, BLOCK: tl.constexpr):
    """The same for few rows: a thread gathers a vector of y, neighbouring threads read neighbouring columns."""
    blocks = tl.cdiv(N * M, BLOCK)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x_ptr += b // B1 * x_b0 + b % B1 * x_b1
    x = tl.load(x_ptr + (i % M).to(tl.int64) * x_row + (i // M).to(tl.int64) * x_col, mask=i < N * M)
    tl.store(y_ptr + b * N * M + i, x, mask=i < N * M)


def tiles_heuristic(sm: int, dtype: torch.dtype, n: int, access: str) -> Config:
    """Tiles whose rows are whole 128-byte lines on both sides; bands of 4 KiB of rows of y. Where accesses are single elements,
    each has an address of its own in registers: 16 a thread (32 spill)."""
    warps = 4 if access == "vectors" else 8
    return {"R": 64, "C": 64, "num_warps": warps, "GROUP": 64 // dtype.itemsize, "DIAGONAL": 0}


def tiles_candidates(sm: int, dtype: torch.dtype, n: int, access: str) -> Any:
    sides = (32, 64, 128, 256)
    orders = [(1, 0), (1, 1), (4, 0), (8, 0), (16, 0), (32, 0)]
    words = 4 // dtype.itemsize
    least, most = (16 * words, 32 * words) if access == "vectors" else (8, 16)
    for c in tiles({"R": sides, "C": sides, "num_warps": (2, 4, 8, 16)}, least, most, of=("R", "C")):
        if min(c["R"], c["C"]) * dtype.itemsize >= 128:
            yield from ({**c, "GROUP": group, "DIAGONAL": diagonal} for group, diagonal in orders)


tiles_configuration = Configurations(__file__, "transpose_tiles", tiles_heuristic, tiles_candidates)


def small_plan(c: TransposeCall) -> Plan:
    """Several matrices a program."""
    m = c.matrices
    r, cols = bucket(m.M), bucket(m.N)
    bb = min(bucket(m.batch), TILE // (r * cols))
    scalars = (m.batch, m.M, m.N, m.B1, m.b0, m.b1, m.row, m.col)
    return Plan(transpose_small, (triton.cdiv(m.batch, bb),), scalars, {"BB": bb, "R": r, "C": cols}, 8)


def narrow_plan(c: TransposeCall) -> Plan:
    m, block = c.matrices, 128 * 16 // c.x.element_size()
    grid = (m.batch * triton.cdiv(m.N * m.M, block),)
    return Plan(transpose_narrow, grid, (m.N, m.B1, m.b0, m.b1, m.row, m.col), {"M": m.M, "BLOCK": block}, 4)


def tiles_plan(c: TransposeCall) -> Plan:
    m, access = c.matrices, "elements" if no_vectors(c) else "vectors"
    config = tiles_configuration(c.x.device, c.x.dtype, c.size_class, access)
    r, cols = fitted(config["R"], config["C"], m.M, m.N)
    even = m.M % r == 0 and m.N % cols == 0
    tile = {"R": r, "C": cols, "EVEN": even, "GROUP": config["GROUP"], "DIAGONAL": config["DIAGONAL"]}
    grid = (m.batch * triton.cdiv(m.M, r) * triton.cdiv(m.N, cols),)
    scalars = (m.M, m.N, m.B1, m.b0, m.b1, m.row, m.col)
    return Plan(transpose_tiles, grid, scalars, tile, config["num_warps"])


def fitted(r: int, c: int, m: int, n: int) -> tuple[int, int]:
    """Rows and columns of a tile in an m x n matrix: where one side is shorter than configured, the other is longer."""
    if n < c:
        c = bucket(n)
        r = max(r, min(TILE // c, bucket(m)))
    if m < r:
        r = bucket(m)
        c = max(c, min(TILE // r, bucket(n)))
    return r, c


FORWARD = Dispatch(
    TransposeCall, ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: not c.last, "other axes than the last two: PyTorch's copy"),
    Route("torch", lambda c: not c.matrices, SCATTERED),
    Route("torch", lambda c: c.plain_copy, "elements that follow each other in y do so in x: a plain copy"),
    Route("cuda", lambda c: c.large, "large: 16-byte accesses on both sides", vectors_plan, no_vectors),
    Route("cuda", lambda c: c.large, "large: read by words, written by whole sectors", windows_plan, no_adjacent_columns),
    Route("triton", lambda c: c.small, "small matrices: several a program", small_plan, scattered),
    Route("triton", lambda c: c.narrow, "columns of 16 or 32 bytes: a thread gathers 16 of them", narrow_plan, scattered),
    Route("triton", lambda c: True, "rows of any alignment", tiles_plan, scattered),
)  # fmt: skip
BACKWARD = FORWARD  # of the gradient of the result: another transpose
