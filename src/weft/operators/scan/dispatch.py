"""Which kernel a scan takes, why, and its launch: one table for forward and one for the gradients of products and logarithms.

The gradient of a sum is a scan from the other end, so forward's table serves it.
"""

import copy
import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from weft.definition import Declined
from weft.operators.axis_view import AxisView, axis_views
from weft.operators.checks import check_dim, check_flag, check_tensor
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned, shared_limit
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.scan import kernels
from weft.operators.scan.kernels import Formula, GradientInParts, RowsPlan, ScanInParts

COPY = "dimensions beside 'dim' that do not collapse into one stride each"
LARGE = 2**20  # elements; of fewer, launching is what counts, and Triton's plans serve
ANYWHERE = 1024  # bytes of a row from which on vectors pay that have only part of it: shorter ones leave lanes idle
PADDED = 512  # elements of a row from which on copies for its gradient pay
ONE_TILE = 512 if INTERPRETING else 16384  # longer rows look back, or are walked
WALKED, FEW = 640 if INTERPRETING else 2 * ONE_TILE, 2**16  # so long rows of tensors of so few elements are walked

FOLDER = Path(__file__).parent
LONGEST = 2**18  # extents beyond are configured alike
MAX_CLUSTER = 16  # blocks
SYSTEM = 1024  # bytes of shared memory that the system takes for a block
REGISTERS = 65536  # of a multiprocessor
IN_FLIGHT = 2**17  # bytes of copies on a multiprocessor

# ---- CUDA C++ kernels of an operator, with their configurations ------------------------------------------------------

# A configuration, the kernel's template arguments.
RING = ("TEAMS", "WARPS", "VECTORS", "SLOTS", "LOADS", "ADDERS", "PER_SM")
# TEAMS, WARPS, VECTORS, ADDERS, PER_SM: tiles of WARPS * VECTORS * 512 bytes, TEAMS of them in registers.
RINGS = ((2, 8, 8, 4, 1), (3, 8, 8, 2, 1), (3, 8, 7, 2, 1), (3, 8, 6, 2, 1), (2, 4, 8, 2, 2))


def warps_of(n_bytes: int, each: int) -> int:
    """Warps that hold a row at so many bytes a thread."""
    return bucket(-(-n_bytes // (32 * each)))


def warps_of_ring(c: Config) -> int:
    """Warps of a block: one takes tiles, one joins what comes before, others add, scan."""
    return 2 + c["ADDERS"] + c["TEAMS"] * c["WARPS"]


def shared_bytes(c: Config) -> int:
    """Shared memory of a block: slots, the state of tiles in flight, the system's."""
    own = 16 * c["SLOTS"] + (c["SLOTS"] + c["TEAMS"]) * (24 + 4 * c["WARPS"])
    return c["SLOTS"] * c["WARPS"] * c["VECTORS"] * 512 + -(-own // 128) * 128 + SYSTEM


def rings(sm: int, shapes: Iterable[tuple[int, ...]]) -> Iterable[Config]:
    """Rings of some shapes with as many slots as fit. How many copies are in flight does not matter (docs/notes/scan.md)."""
    room = shared_limit(sm) + SYSTEM
    for teams, warps, vectors, adders, per_sm in shapes:
        c = dict(zip(RING, (teams, warps, vectors, 16, 16, adders, per_sm), strict=True))
        while c["SLOTS"] and shared_bytes(c) * per_sm > room:
            c["SLOTS"] -= 1
        c["LOADS"] = min(IN_FLIGHT // (warps * vectors * 512 * per_sm), c["SLOTS"])
        registers = 24 + 5 * vectors  # of a thread, at least
        if c["SLOTS"] >= teams and 32 * warps_of_ring(c) * registers * per_sm <= REGISTERS:
            yield c


@dataclass(frozen=True)
class RowsKernel:
    """What scans rows of one formula (``scan.cu``): rows in registers, so many BYTES a thread and at least so many THREADS a
    block, or longer rows in a ring of tiles, whose configuration is the kernel's template arguments."""

    type: str  # the C++ type that computes it, ``{}`` for an element's
    held: tuple[int, int] = (128, 128)  # bytes of a row that a thread holds, of 32 and of 16 bits an element
    held_before_sm_90: int = 128
    rings: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = (RINGS, RINGS)  # likewise
    short: int = 2**17  # bytes of rows that blocks of 128 threads take

    def heuristic(self, sm: int, dtype: torch.dtype, n: int) -> Config:
        """Rows of up to 512 KiB in registers; longer ones in the first ring that fits, 128 KiB in flight."""
        if sm < 90 or (n < LONGEST and n * dtype.itemsize <= 2**19):
            each = self.held[dtype.itemsize == 2] if sm >= 90 else self.held_before_sm_90
            return {"BYTES": each, "THREADS": 128 if n * dtype.itemsize <= self.short else 512}
        return next(iter(rings(sm, self.rings[dtype.itemsize == 2])))

    def candidates(self, sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
        each, shapes = self.held[dtype.itemsize == 2], self.rings[dtype.itemsize == 2]
        for c in grid_of({"BYTES": (each // 2, each), "THREADS": (64, 128, 256, 512)}):
            most = c["THREADS"] * (MAX_CLUSTER if sm >= 90 else 1)
            if n < LONGEST and 32 * warps_of(n * dtype.itemsize, c["BYTES"]) <= most:
                yield c
        if sm < 90:
            return
        for c in rings(sm, shapes):
            spills = dtype != torch.float32 and c["TEAMS"] * c["VECTORS"] == 24
            if not spills and c["WARPS"] * c["VECTORS"] * 512 <= n * dtype.itemsize:
                yield c


@dataclass(frozen=True)
class ColumnsKernel:
    """What scans columns of one formula. ACROSS vectors of 16 bytes side by side in a block, at most; ROWS of a thread in a
    step; THREADS of a block."""

    source: str  # its file
    name: str  # with its first template arguments, ``{}`` for an element
    across: tuple[int, int] = (16, 16)  # vectors of 16 bytes side by side in a block, of 32 and of 16 bits an element
    held: tuple[int, int] = (128, 128)  # bytes of x that a thread has in a step, likewise

    def heuristic(self, sm: int, dtype: torch.dtype, n: int) -> Config:
        """At 512 threads 32 or 64 KiB in flight to a multiprocessor."""
        of = dtype.itemsize == 2
        return {"ACROSS": self.across[of], "ROWS": self.held[of] // 16, "THREADS": 256}

    def candidates(self, sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
        most = self.held[dtype.itemsize == 2] // 16
        yield from grid_of({"ACROSS": (4, 8, 16, 32), "ROWS": (most // 2, most), "THREADS": (128, 256)})


def gradient_rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """32 bytes a thread of each of three tensors: at 1024 threads 96 KiB in flight to a multiprocessor. Several blocks take a
    row only where one cannot."""
    return {"BYTES": 32, "THREADS": min(max(128, 32 * warps_of(n * dtype.itemsize, 32)), 512)}


def gradient_rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    for c in grid_of({"BYTES": (16, 32, 64), "THREADS": (128, 256, 512)}):
        if 32 * warps_of(min(n, PART) * dtype.itemsize, c["BYTES"]) <= c["THREADS"] * (MAX_CLUSTER if sm >= 90 else 1):
            yield c


def gradient_columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """48 KiB of three tensors in flight to a multiprocessor."""
    if dtype == torch.float32:
        return {"ACROSS": 16, "ROWS": 2, "THREADS": 256}
    return {"ACROSS": 8, "ROWS": 4, "THREADS": 128}


# ---- a call ----------------------------------------------------------------------------------------------------------


class Scan:
    """One of the three operators.

    Args:
        scan: the inclusive forward scan in PyTorch, ``(x, dim)``.
        log: whether the gradient is that of a logarithm of sums, or of products; None where it is a scan itself (a sum's).
        wide_in_autocast: PyTorch gives fp32 under autocast.
    """

    def __init__(
        self, name: str, scan: Callable[[Tensor, int], Tensor], formula: Formula, rows: RowsKernel, columns: ColumnsKernel,
        *, log: bool | None, wide_in_autocast: bool = False,
    ):  # fmt: skip
        self.name, self.scan, self.formula, self.log, self.wide_in_autocast = name, scan, formula, log, wide_in_autocast
        self.rows_kernel, self.columns_kernel = rows, columns

        def configured(kernel: str, heuristic: Callable[..., Config], candidates: Any) -> Configurations:
            return Configurations(__file__, f"{name}_{kernel}", heuristic, candidates)

        self.rows = configured("cuda_rows", rows.heuristic, rows.candidates)
        self.columns = configured("cuda_columns", columns.heuristic, columns.candidates)
        self.gradient_rows = configured("cuda_gradient_rows", gradient_rows_heuristic, gradient_rows_candidates)
        walks = list(grid_of({"ACROSS": (4, 8, 16), "ROWS": (2, 4), "THREADS": (128, 192, 256)}))
        self.gradient_columns = configured("cuda_gradient_columns", gradient_columns_heuristic, walks)

    def reference(self, x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """In PyTorch, which has neither option: by shifting and flipping the input."""
        if reverse:
            x = x.flip(dim)
        if exclusive and x.ndim and x.shape[dim]:  # the first result is a constant: its derivatives are 0
            none = torch.full_like(x.narrow(dim, 0, 1), self.formula.neutral)
            y = torch.cat([none, self.scan(x.narrow(dim, 0, x.shape[dim] - 1), dim)], dim)
        elif exclusive:
            y = x.masked_fill(torch.ones_like(x, dtype=torch.bool), self.formula.neutral)
        else:
            y = self.scan(x, dim)
        return y.flip(dim) if reverse else y

    def check(self, x: Tensor, dim: int, exclusive: bool, reverse: bool) -> int:
        """``dim`` from the front. Raises TypeError or ValueError."""
        check_tensor(self.name, "x", x)
        check_flag(self.name, "exclusive", exclusive)
        check_flag(self.name, "reverse", reverse)
        return check_dim(self.name, dim, x.ndim)


@dataclass
class ScanCall(Call):
    """What conditions and launches look at. Args: dtype: of the result; y, dy: for a launch of the gradient."""

    x: Tensor
    op: Scan
    dim: int
    exclusive: bool
    reverse: bool
    dtype: torch.dtype
    y: Tensor | None = None
    dy: Tensor | None = None

    def __post_init__(self) -> None:
        self.dim = self.op.check(self.x, self.dim, self.exclusive, self.reverse)

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """x, y and dy of a gradient, and a result like x."""
        like = torch.empty_like(self.x, device="meta")
        return (self.x, like) if self.y is None or self.dy is None else (self.x, self.y, self.dy, like)

    @functools.cached_property
    def views(self) -> Any:
        """Of ``tensors``. Any: where it is None, no route with a launch supports the call."""
        return axis_views(self.x, self.dim, *self.tensors[1:])

    @property
    def v(self) -> AxisView:
        return self.views[0]

    @property
    def large(self) -> bool:
        return self.x.numel() >= LARGE and not INTERPRETING

    @property
    def large_rows(self) -> bool:
        return self.large and self.v.N * self.x.element_size() >= ANYWHERE

    @property
    def few_rows(self) -> bool:
        """Whether there are so few rows that most threads of a warp, 8 vectors of 16 bytes across, would have none."""
        return 8 * 32 // min(8, bucket(self.v.K * self.x.element_size() // 16)) > 2 * self.v.N

    @property
    def walked(self) -> bool:
        """Whether a program walks a row of several tiles: looking back takes cleared words, one launch more."""
        return self.v.K == 1 and ONE_TILE < self.v.N <= WALKED and self.x.numel() <= FEW

    def config(self, configured: Configurations) -> Config:
        return configured(self.x.device, self.x.dtype, min(bucket(self.v.N), LONGEST))


# ---- Triton ----------------------------------------------------------------------------------------------------------


def uncollapsed(c: ScanCall) -> str:
    return COPY if c.views is None else ""


def tiles_launch(c: ScanCall) -> ScanInParts:
    (v, y), formula = c.views, c.op.formula
    kind = formula.rows if v.K == 1 else formula.columns
    config = kind(c.x.device, c.x.dtype, ONE_TILE // 2 if c.walked else min(bucket(v.N), kernels.LONGEST))
    if v.K == 1 and v.unit(y) == 1 and v.N > 512 and not c.walked:
        config = {"TILE": 1024, "num_warps": 2}  # elements are read one by one: a short tile has few lanes without any
    return kernels.tiles_plan(v, y, config, c.x, formula, int(c.exclusive), c.reverse, cut=not c.walked)


def long_rows_unsupported(c: ScanCall) -> str:
    return uncollapsed(c) or ("" if c.v.K == 1 else "columns, which are walked")


def long_rows_launch(c: ScanCall) -> RowsPlan:
    (v, y), x, formula = c.views, c.x, c.op.formula
    config = formula.long_rows(x.device, x.dtype)
    block, group = (64, 4) if INTERPRETING else (config["BLOCK"], config["GROUP"])
    tiles = triton.cdiv(v.N, block)
    shift, vector = -int(c.exclusive) if c.reverse else int(c.exclusive), kernels.vector(v, x, block, c.reverse)
    constants = {
        **formula.constants,
        "REVERSE": c.reverse,
        "SHIFT": shift,
        "VECTOR": vector,
        "BLOCK": block,
        "GROUP": group,
    }
    scalars = (v.N, tiles, v.m, v.n, y.m, y.n)
    launch = Plan(kernels.scan_long_rows, (v.M * tiles,), scalars, constants, config["num_warps"])
    return RowsPlan(launch, 1 + v.M * (tiles + triton.cdiv(tiles, group) + triton.cdiv(tiles, group**2)))


def gradient_launch(c: ScanCall) -> GradientInParts:
    v, formula = c.v, c.op.formula
    config = formula.gradient(c.x.device, c.x.dtype, min(bucket(v.N), kernels.LONGEST))
    t = kernels.Tiling(v, config, c.x.device, cut=True)
    scalars = (v.M, v.N, v.K, t.parts, *(s for view in c.views for s in (view.m, view.n, view.k)))

    reverse = not c.reverse  # the recurrence runs the other way
    known = {"LOG": bool(c.op.log), "REVERSE": reverse, "SHIFT": int(c.exclusive), **t.constants}

    def launch(mode: str) -> Plan:
        parts = {"TOTALS": mode == "TOTALS", "CARRIED": mode == "CARRIED"}
        constants = {**known, **parts, "VECTOR": kernels.vector(v, c.x, t.reach, reverse)}
        return Plan(kernels.gradient_tiles, t.grid, scalars, constants, t.num_warps)

    return GradientInParts.of(v.M, t.parts, v.K, launch, reverse=reverse)


# ---- CUDA C++: rows of adjacent elements, 16 bytes an access ---------------------------------------------------------

HEAD = 16  # words of state before the first row's, as in scan.cu
PART, MOST_PARTS = 2**16, 2**13  # elements of a part of a row that no cluster holds, at least; parts of a row
NAMES = ("x", "y", "dy", "dx")


def longs(*values: int) -> tuple[ctypes.c_longlong, ...]:
    return tuple(ctypes.c_longlong(value) for value in values)


def one_grid(blocks: int) -> int:
    if blocks >= 2**31:
        raise Declined(f"{blocks} blocks; a grid has 2**31 - 1")
    return blocks


def vectors_unsupported(c: ScanCall) -> str:
    """Why rows cannot be read and written 16 bytes at a time."""
    if c.views is None:
        return COPY
    if c.dtype != c.x.dtype:
        return "a result of another dtype than x"
    count, names = 16 // c.x.element_size(), NAMES if c.y is not None else ("x", "y")
    for name, v, t in zip(names, c.views, c.tensors, strict=True):
        if t.dtype != c.x.dtype:
            return f"{name} of another dtype than x"
        if v.K != 1 or v.n != 1:
            return "elements along 'dim' that do not lie side by side"
        if v.N % count or (v.M > 1 and v.m % count) or not pointer_aligned(t):
            return f"rows of {name} that do not begin and end on 16 bytes"
    return ""


def rows_unsupported(c: ScanCall) -> str:
    if reason := vectors_unsupported(c):
        return reason
    if c.sm < 90 and c.v.N * c.x.element_size() > 1024 * c.op.rows_kernel.held_before_sm_90:
        return "rows longer than a block's registers hold; tiles need copies that come with sm_90"
    return ""


def anywhere_unsupported(c: ScanCall) -> str:
    """Why rows cannot be held in registers as the vectors of 16 bytes that they have parts of."""
    if c.views is None:
        return COPY
    if c.dtype != c.x.dtype or any(v.K != 1 or v.n != 1 for v in c.views):
        return "a result of another dtype than x, or elements along 'dim' that do not lie side by side"
    config, most = c.config(c.op.rows), MAX_CLUSTER if c.sm >= 90 else 1
    threads = 1024 if c.sm < 90 else config.get("THREADS", 0)
    held = 32 * warps_of(_spanned(c) * 16, config.get("BYTES", 16)) <= most * threads
    return "" if held else f"rows of {c.v.N} elements that do not begin on 16 bytes: registers hold none of them"


def _spanned(c: ScanCall) -> int:
    """Vectors of 16 bytes that a row has parts of, at most."""
    return -(-c.v.N * c.x.element_size() // 16) + (vectors_unsupported(c) != "")


def rows_launch(c: ScanCall) -> RowsPlan:
    config, element = c.config(c.op.rows), CTYPES[c.x.dtype]
    kind = f"{element}, {c.op.rows_kernel.type.format(element)}, {flags(c.reverse, c.exclusive)}"
    return (_rows if "BYTES" in config else _ring)(c, config, kind)


def _rows(c: ScanCall, config: Config, kind: str) -> RowsPlan:
    """Whole rows in registers, up to BYTES a thread: several rows by a warp, or one by several warps or a cluster of blocks."""
    x, (v, y) = c.x, c.views
    vectors, each = _spanned(c), config["BYTES"] // 16
    lanes = min(bucket(vectors), 32)
    needed = warps_of(vectors * 16, config["BYTES"])
    threads = config["THREADS"] if c.sm >= 90 else max(config["THREADS"], 32 * needed)
    warps = min(needed, threads // 32)
    cluster = needed // warps
    held = -(-vectors // (lanes * needed))
    rows = max(each // held, 1) if cluster == 1 else 1
    blocks = cluster * -(-v.M // (threads // (32 * warps) * rows * (32 // lanes)))
    alike = pointer_aligned(x) and (v.M == 1 or (v.m - y.m) * x.element_size() % 16 == 0)
    begin = ", ALIKE" if alike else ", ANYWHERE"
    begin = begin if vectors_unsupported(c) else ""
    kernel = f"scan_rows<{kind}, {lanes}, {held}, {rows}, {warps}, {threads}, {cluster}{begin}>"
    strides = longs(v.M, v.N, v.m, y.m)
    return RowsPlan(CudaPlan(FOLDER / "scan.cu", kernel, (one_grid(blocks), 1), threads, strides, cluster))


def _ring(c: ScanCall, config: Config, kind: str) -> RowsPlan:
    """Rows in tiles that look back."""
    x, (v, y) = c.x, c.views
    tile = config["WARPS"] * config["VECTORS"] * 512  # bytes
    tiles = -(-v.N * x.element_size() // tile)
    blocks = min(multiprocessors(x.device) * config["PER_SM"], one_grid(v.M * tiles))
    kernel = f"scan_ring<{kind}, {', '.join(str(config[k]) for k in RING)}>"
    scalars = (*longs(v.N), ctypes.c_uint(tiles), ctypes.c_uint(v.M * tiles), *longs(v.m, y.m))
    threads, slots = warps_of_ring(config) * 32, config["SLOTS"] * tile
    launch = CudaPlan(FOLDER / "scan.cu", kernel, (blocks, 1), threads, scalars, shared_bytes=slots)
    return RowsPlan(launch, HEAD + v.M * tiles)


@dataclass(frozen=True)
class GradientRows:
    """How rows are laid over threads: the parts of a row, of ``each`` elements, and the template arguments."""

    each: int
    parts: int
    lanes: int
    held: int
    warps: int
    threads: int
    cluster: int

    @classmethod
    def of(cls, c: ScanCall) -> "GradientRows":
        v, x, config = c.v, c.x, c.config(c.op.gradient_rows)
        count, threads, most = 16 // x.element_size(), config["THREADS"], config["BYTES"] // 16
        whole = 32 * warps_of(v.N * x.element_size(), config["BYTES"]) <= MAX_CLUSTER * threads
        each = v.N if whole else max(PART, -(-v.N // MOST_PARTS // count) * count)
        vectors = -(-each // count)
        lanes = min(bucket(-(-vectors // most)), 32)
        held = min(most, -(-vectors // lanes))
        needed = bucket(-(-vectors // (lanes * held)))
        warps = min(needed, threads // 32)
        return cls(each, -(-v.N // each), lanes, held, warps, threads, needed // warps)


def gradient_rows_unsupported(c: ScanCall) -> str:
    if reason := vectors_unsupported(c):
        return reason
    fits = c.sm < 90 or GradientRows.of(c).cluster <= MAX_CLUSTER
    return "" if fits else f"rows of {c.v.N} elements: a cluster holds none of their parts"


def gradient_rows_launch(c: ScanCall) -> GradientInParts:
    v, r = c.v, GradientRows.of(c)
    teams, side = r.threads // (32 * r.warps), 32 // r.lanes
    blocks = one_grid(r.cluster * -(-v.M * r.parts // (teams * side)))
    kind = f"{CTYPES[c.x.dtype]}, {flags(bool(c.op.log), not c.reverse, c.exclusive)}"
    scalars = longs(v.M * r.parts, v.N, r.each, r.parts, *(view.m for view in c.views))

    def launch(mode: str) -> CudaPlan:
        kernel = f"scan_gradient<{kind}, {mode}, {r.lanes}, {r.held}, {r.warps}, {r.threads}, {r.cluster}>"
        return CudaPlan(FOLDER / "gradient.cu", kernel, (blocks, 1), r.threads, scalars, r.cluster)

    return GradientInParts.of(v.M, r.parts, 1, launch, reverse=not c.reverse)


def padded(c: ScanCall) -> ScanCall:
    """The call on copies whose rows begin and end on 16 bytes."""
    count, found = 16 // c.x.element_size(), copy.copy(c)
    width = -(-c.v.N // count) * count
    found.__dict__["views"] = [AxisView(c.v.M, width, 1, width, 1, 0)] * 4
    return found


def padded_gradient_unsupported(c: ScanCall) -> str:
    if c.views is None:
        return COPY
    if c.v.K != 1 or any(t.dtype != c.x.dtype for t in c.tensors):
        return "columns, or tensors of several dtypes"
    fits = c.sm < 90 or GradientRows.of(padded(c)).cluster <= MAX_CLUSTER
    return "" if fits else f"rows of {c.v.N} elements: a cluster holds none of their parts"


def padded_gradient_launch(c: ScanCall) -> Callable[..., None]:
    """Call with ``(x, y, dy, dx)``. What the kernel finds behind a row is what it takes for an element that is not there."""
    wide = padded(c)
    launch, (m, n), width = gradient_rows_launch(wide), (c.v.M, c.v.N), wide.v.N
    behind = (0.0, torch.inf, 0.0) if c.op.log else (1.0, 1.0, 0.0)

    def run(*tensors: Tensor) -> None:
        *given, dx = (t.as_strided((m, n), (v.m, v.n)) for t, v in zip(tensors, c.views, strict=True))
        buffers = dx.new_empty((4, m, width))
        for buffer, t, value in zip(buffers, given, behind, strict=False):
            buffer[:, :n].copy_(t)
            buffer[:, n:].fill_(value)
        launch(*buffers)
        dx.copy_(buffers[3, :, :n])

    return run


# ---- CUDA C++: columns, 16 bytes an access ---------------------------------------------------------------------------

STEPS = 4  # of a part of N, at least
RESIDENT = 512  # threads at a time on a multiprocessor, as the launch bounds of the kernels of scans say
LIMIT = 2**30  # elements of a column, which a kernel counts in 32 bits


def columns_unsupported(c: ScanCall) -> str:
    """Why tensors cannot be taken 16 bytes of columns at a time."""
    if c.views is None:
        return COPY
    if c.v.K == 1:
        return "rows, not columns"
    count = 16 // c.x.element_size()
    if any(t.dtype != c.dtype for t in c.tensors):
        return "a result of another dtype than x"
    if any(view.k != 1 for view in c.views):
        return "neither elements along 'dim' nor those beside them lie side by side"
    apart = [stride for view in c.views for extent, stride in ((c.v.M, view.m), (c.v.N, view.n)) if extent > 1]
    if c.v.K % count or any(stride % count for stride in apart) or not all(map(pointer_aligned, c.tensors)):
        return "columns that do not begin and end on 16 bytes"
    if c.v.N > LIMIT:
        return f"{c.v.N} elements along 'dim'; columns are counted up to {LIMIT}"
    return ""


class Walk:
    """How blocks walk down the columns of [M, N, K]: ``across`` vectors of 16 bytes side by side in a block, ``rows`` of a
    thread in a step, ``parts`` of N with ``each`` rows. ``resident``: threads at a time on a multiprocessor; ``cut``: N may be
    cut into parts, for more blocks."""

    def __init__(self, v: AxisView, x: Tensor, config: Config, resident: int, *, cut: bool = True):
        vectors = v.K * x.element_size() // 16
        self.across, self.rows, threads = min(config["ACROSS"], bucket(vectors)), config["ROWS"], config["THREADS"]
        while threads > 32 and threads // self.across * self.rows >= 2 * v.N:
            threads = max(threads // 64, 1) * 32
        step = threads // self.across * self.rows
        blocks = v.M * -(-vectors // self.across)
        most = resident // threads * multiprocessors(x.device)  # blocks that run at a time
        parts = max(min(most // blocks, v.N // (STEPS * step)), 1) if cut and 3 * blocks <= most else 1
        self.each = -(-v.N // (parts * step)) * step
        self.threads, self.parts = threads, -(-v.N // self.each)
        self.blocks, self.v = one_grid(blocks * self.parts), v

    def launch(self, source: str, kind: str, views: Iterable[AxisView], *more: int) -> CudaPlan:
        """Args: kind: the kernel with its template arguments up to those of the walk; more: those behind them."""
        numbers = ", ".join(map(str, (self.across, self.rows, self.threads, *more)))
        strides = longs(*(stride for view in views for stride in (view.m, view.n)))
        extents = (ctypes.c_int(self.v.N), *longs(self.v.K), ctypes.c_int(self.each), ctypes.c_int(self.parts))
        return CudaPlan(FOLDER / source, f"{kind}, {numbers}>", (self.blocks, 1), self.threads, (*extents, *strides))


def columns_plan(
    views: Sequence[AxisView], x: Tensor, op: Scan, *, exclusive: bool, reverse: bool, cut: bool = True
) -> ScanInParts:
    """A scan of columns. ``views``: of x and y; ``cut``: N may be cut into parts."""
    v, kernel = views[0], op.columns_kernel
    walk = Walk(v, x, op.columns(x.device, x.dtype, min(bucket(v.N), LONGEST)), RESIDENT, cut=cut)
    kind = f"{kernel.name.format(CTYPES[x.dtype])}, {flags(reverse, exclusive)}"
    shape, scaled = (v.M, walk.parts, v.K), op.formula.scaled
    carries: ScanInParts | Plan | None = None
    if walk.parts > 1 and scaled:
        carries = kernels.carry_products_launch(v, walk.parts)
    elif walk.parts > 1:
        between = AxisView(*shape, walk.parts * v.K, v.K, 1)
        totals = torch.empty(0, dtype=torch.float32, device=x.device)
        carries = columns_plan((between, between), totals, op, exclusive=True, reverse=False, cut=False)
    scan = walk.launch(kernel.source, f"{kind}, {'WHOLE' if walk.parts == 1 else 'CARRIED'}", views)
    return ScanInParts(shape, scan, walk.launch(kernel.source, f"{kind}, TOTALS", views), carries, scaled)


def gradient_columns_launch(c: ScanCall) -> GradientInParts:
    v, config = c.v, c.config(c.op.gradient_columns)
    # threads at a time on a multiprocessor, by the registers that they need
    threads = 256 if config["ROWS"] > 2 else 512 if c.x.dtype == torch.float32 else 384
    walk = Walk(v, c.x, config, threads)
    kind = f"{CTYPES[c.x.dtype]}, {flags(bool(c.op.log), not c.reverse, c.exclusive)}"

    def launch(mode: str) -> CudaPlan:
        kernel = f"gradient_columns<{kind}, {mode}"
        return walk.launch("gradient_columns.cu", kernel, c.views, threads // walk.threads)

    return GradientInParts.of(v.M, walk.parts, v.K, launch, reverse=False)


# fmt: off
FIRST = (
    ON_CPU, TRACED, EMPTY,
    Route("torch", lambda c: c.x.ndim == 0, "a scalar: nothing to scan"),
    Route("torch", lambda c: c.views is None, COPY),
)
FORWARD = Dispatch(
    ScanCall,
    *FIRST,
    Route("cuda", lambda c: c.large,
          "rows of adjacent elements: 16 bytes an access, rows in registers or in a ring of tiles with look-back",
          rows_launch, rows_unsupported),
    Route("cuda", lambda c: c.large_rows,
          "rows that begin anywhere, in registers: vectors of 16 bytes that they have parts of",
          rows_launch, anywhere_unsupported),
    Route("cuda", lambda c: c.large and not c.few_rows,
          "columns side by side: 16 bytes an access, a block walks down its columns",
          lambda c: columns_plan(c.views, c.x, c.op, exclusive=c.exclusive, reverse=c.reverse), columns_unsupported),
    Route("triton", lambda c: c.v.N > ONE_TILE and not c.walked, "rows longer than a tile: one pass, by look-back",
          long_rows_launch, long_rows_unsupported),
    Route("triton", lambda c: True, "one stride before, along and after the axis: tiles that walk along it with a carry",
          tiles_launch, uncollapsed),
)
BACKWARD = Dispatch(
    lambda x, y, dy, op, dim, exclusive, reverse: ScanCall(x, op, dim, exclusive, reverse, x.dtype, y, dy),
    *FIRST,
    Route("cuda", lambda c: c.large, "rows of adjacent elements: 16 bytes an access, a cluster of blocks holds a row",
          gradient_rows_launch, gradient_rows_unsupported, sm=90),
    Route("cuda-padded", lambda c: c.large and c.v.K == 1 and c.v.N >= PADDED,
          "rows that begin anywhere: copied to rows that begin on 16 bytes",
          padded_gradient_launch, padded_gradient_unsupported, sm=90),
    Route("cuda", lambda c: c.large and not c.few_rows,
          "columns side by side: 16 bytes an access, a block walks down its columns",
          gradient_columns_launch, columns_unsupported),
    Route("triton", lambda c: True, "one stride before, along and after the axis: tiles that walk along it with a carry",
          gradient_launch, uncollapsed),
)
