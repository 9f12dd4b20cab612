"""Which kernel computes a softmax, forward and backward: one pair of tables for ``softmax`` and ``log_softmax``, one for
``causal_softmax`` and ``masked_softmax``. Thresholds were measured on an H100 and an H200 (docs/notes/softmax.md)."""

import ctypes
import functools
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.operators import row_cluster
from weft.operators.call import FLOATS
from weft.operators.checks import check_device, check_dim, check_shape, check_tensor, check_value
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.contiguous import side_by_side
from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned, shared_limit
from weft.operators.dispatch import EMPTY, ON_CPU, TRACED, Call, Dispatch, Route
from weft.operators.launch import multiprocessors
from weft.operators.layout import rows_of, views, within_reach
from weft.operators.row_cluster import LONGEST, MAX_CLUSTER, RowCluster
from weft.operators.row_cluster import REASON as CLUSTER
from weft.operators.row_programs import LONG, ONE_PASS, WHOLE, lie_apart
from weft.operators.softmax import kernels
from weft.operators.softmax.kernels import launch_rows

FOLDER = Path(__file__).parent
MASK_COPY = "the mask's leading dimensions do not merge into three, so a copy would be needed"
COPIED = "rows of no one stride or side by side: the public functions copy x first"
ONE_STRIDE = "the leading dimensions do not collapse into rows of one stride, so a copy would be needed"


class RowCall(Call):
    """A call on m rows of n columns of several tensors of one shape, the last of which is written. ``name`` is that of the
    configurations, ``triton`` the kernels of whole rows and of long rows, ``arguments`` their scalars and flags."""

    name: str
    triton: tuple[Any, Any]
    causal: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """With the columns last."""
        raise NotImplementedError

    @property
    def m(self) -> int:
        return views(self.tensors[0])[0][0]

    @property
    def n(self) -> int:
        return self.tensors[0].shape[-1]

    @property
    def s(self) -> int:
        """Rows of a matrix, after which a causal mask starts again."""
        return self.x.shape[-2] if self.causal else 1

    @property
    def copy_needed(self) -> str:
        """Why no kernel can read the tensors in place ("" when one can)."""
        return "" if all(map(within_reach, self.tensors)) else ONE_STRIDE

    @property
    def strides(self) -> list[int]:
        """Row and column stride of each tensor."""
        return [stride for view in views(*self.tensors) for stride in view[2:]]

    @property
    def row_strides(self) -> list[int]:
        return self.strides[::2]


TRITON = (
    Route("triton", lambda c: c.n <= ONE_PASS, WHOLE, launch_rows, lambda c: c.copy_needed),
    Route("triton", lambda c: True, LONG, launch_rows, lambda c: c.copy_needed),
)


@dataclass
class GradientCall(RowCall):
    """dx from the result x and its gradient dy: ``softmax``'s, ``log_softmax``'s with ``logs``, that of a ``causal`` mask, or
    of another one, which is not read."""

    x: Tensor
    dy: Tensor
    name: str
    dim: int = -1
    logs: bool = False
    scale: float = 1.0
    causal: bool = False

    triton = kernels.softmax_backward_rows, kernels.softmax_backward_long_rows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t.movedim(self.dim, -1) for t in (self.x, self.dy, torch.empty_like(self.x, device="meta")))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        flags = {"LOG": self.logs, "CAUSAL": self.causal, "ACCURATE": self.x.dtype == torch.float32}
        return (self.n, self.s, *self.strides, self.scale), flags


def softmax_gradient(x: Tensor, dy: Tensor, dim: int, logs: bool) -> GradientCall:
    return GradientCall(x, dy, "log_softmax_backward" if logs else "backward", dim, logs)


def masked_gradient(x: Tensor, dy: Tensor, scale: float, causal: bool) -> GradientCall:
    return GradientCall(x, dy, "masked_backward", scale=scale, causal=causal)


# ---- softmax and log_softmax -------------------------------------------------------------------------------------------


@dataclass
class SoftmaxCall(RowCall):
    """``softmax(x, dim)``, or ``log_softmax`` with ``logs``. ``gradient``: one is wanted."""

    x: Tensor
    dim: int
    logs: bool
    gradient: bool = False

    triton = kernels.softmax_rows, kernels.softmax_long_rows

    def __post_init__(self) -> None:
        operator, self.name = ("log_softmax", "log_softmax") if self.logs else ("softmax", "forward")
        check_tensor(operator, "x", self.x)
        self.dim = check_dim(operator, self.dim, self.x.ndim)
        self.along = self.x.movedim(self.dim, -1) if self.x.ndim else self.x

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.along, torch.empty_like(self.x, device="meta").movedim(self.dim, -1)

    @property
    def copy_needed(self) -> str:
        return "" if within_reach(self.along) else ONE_STRIDE  # where x's dimensions collapse, the result's do too

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.n, *self.strides), {"LOG": self.logs, "ACCURATE": self.x.dtype == torch.float32}


cluster_configuration = Configurations(__file__, "cluster", row_cluster.heuristic, row_cluster.candidates)


def launch_cluster(c: SoftmaxCall) -> CudaPlan:
    rows = RowCluster.of(c.along, cluster_configuration(c.x.device, c.x.dtype, bucket(c.n)))
    kernel = f"softmax_cluster<{CTYPES[c.x.dtype]}, {rows.template}, {flags(c.logs)}>"
    return CudaPlan(FOLDER / "cluster.cu", kernel, rows.grid, rows.threads, rows.scalars, rows.cluster)


RESERVED = 2048  # bytes of shared memory that a block needs besides dy: barrier, sums and what the system takes
# The largest cluster that blocks of so many threads make before larger blocks are taken; two of 512 share a multiprocessor.
LARGEST_CLUSTER = {128: 4, 256: 8, 512: 16, 1024: 16}


def backward_candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    """Slices of a row by block, and dy in SHARED memory or in registers, of which y and dy take 64 or 128 bytes a thread."""
    for c in grid_of({"THREADS": (128, 256, 512, 1024), "BYTES": (32, 64, 128), "SHARED": (0, 1)}):
        slice_bytes, registers = c["THREADS"] * c["BYTES"], c["BYTES"] * (2 - c["SHARED"])
        fits = slice_bytes * c["SHARED"] + RESERVED <= shared_limit(sm)
        if registers in (64, 128) and fits and slice_bytes < 2 * n * dtype.itemsize <= 2 * slice_bytes * MAX_CLUSTER:
            yield {"THREADS": c["THREADS"], "EACH": c["BYTES"] // dtype.itemsize, "SHARED": c["SHARED"]}


def backward_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """128 bytes of registers a thread; shared memory too for rows of over 64 KiB, which would need clusters of more than four
    blocks without it; the fewest threads a block that make no large cluster."""

    def rank(c: Config) -> tuple[int, ...]:
        blocks = bucket(-(-n // (c["THREADS"] * c["EACH"])))
        wanted = int(n * dtype.itemsize > 2**16)
        return (c["SHARED"] != wanted, -c["EACH"], blocks > LARGEST_CLUSTER[c["THREADS"]], c["THREADS"])

    return min(backward_candidates(sm, dtype, n), key=rank)


@functools.cache
def longest_backward(sm: int, dtype: torch.dtype) -> int:
    """Columns of the longest rows of y and dy that a cluster holds."""
    n = LONGEST
    while not any(True for _ in backward_candidates(sm, dtype, n)):
        n //= 2
    return n


cluster_backward_configuration = Configurations(__file__, "cluster_backward", backward_heuristic, backward_candidates)


def cluster_backward_unsupported(c: GradientCall) -> str:
    if c.x.dtype != c.dy.dtype:
        return f"a gradient of dtype {c.dy.dtype} for a result of {c.x.dtype}"
    y, dy, dx = c.tensors
    if reason := row_cluster.why_not(y) or row_cluster.why_not(dy):
        return reason
    if c.n > (most := longest_backward(c.sm, c.x.dtype)):
        return f"{c.n} columns; a cluster of {MAX_CLUSTER} blocks holds {most} of y and dy"
    return row_cluster.why_not(dx)


def launch_cluster_backward(c: GradientCall) -> CudaPlan:
    config = cluster_backward_configuration(c.x.device, c.x.dtype, bucket(c.n))
    rows = RowCluster.of(c.tensors[0], config)
    shared_bytes = rows.elements * c.x.element_size() * config["SHARED"]
    kernel = f"softmax_backward_cluster<{CTYPES[c.x.dtype]}, {rows.template}, {flags(config['SHARED'], c.logs)}>"
    scalars = tuple(ctypes.c_longlong(v) for v in (c.n, *c.row_strides))
    source = FOLDER / "cluster_backward.cu"
    return CudaPlan(source, kernel, rows.grid, rows.threads, scalars, rows.cluster, shared_bytes)


FEWEST_BESIDE = 1024  # rows; a program takes 8 of fp32 or 16 of 16 bits, which fill a sector
LONG_BESIDE = 256  # columns; a program holds shorter rows, side by side or not
BY_ROWS = "a gradient of long rows that lie side by side: PyTorch's result, and what autograd reads then, lies by rows"
OF_BOTH = "a cluster of blocks holds a row of y and dy, which are read once"

FORWARD = Dispatch(
    SoftmaxCall,
    ON_CPU,
    Route("torch", lambda c: c.x.ndim == 0 or c.empty, "empty or a scalar: nothing to launch"),
    Route("torch", lambda c: c.copy_needed, ONE_STRIDE),
    Route("torch", lambda c: c.m < FEWEST_BESIDE and lie_apart(c.strides), "few rows, side by side: too few programs"),
    Route("torch", lambda c: c.gradient and c.n > LONG_BESIDE and lie_apart(c.strides), BY_ROWS),
    Route("cuda", lambda c: c.n >= 16384, CLUSTER, launch_cluster, lambda c: row_cluster.why_not(c.along), sm=90),
    *TRITON,
)

BACKWARD = Dispatch(
    softmax_gradient,
    Route("cuda", lambda c: c.n >= 16384, OF_BOTH, launch_cluster_backward, cluster_backward_unsupported, sm=90),
    *TRITON,
)


# ---- causal_softmax and masked_softmax ---------------------------------------------------------------------------------

CAUSAL, NONE, BOOLEAN, ADDITIVE = "causal", "none", "boolean", "additive"  # kinds of masks
MASK_LEVELS = 3  # strides by which kernels find a row of the mask
LARGEST = torch.finfo(torch.float32).max


def mask_levels(mask: Tensor) -> tuple[int, ...] | None:
    """A mask of x's shape (expanded) as ``(m1, m2, s0, s1, s2, column stride)``: leading dimensions merged wherever strides
    allow; None where more than three are left."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(mask.shape[:-1], mask.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > MASK_LEVELS:
        return None
    (_, s0), (m1, s1), (m2, s2) = [*[(1, 0)] * (MASK_LEVELS - len(merged)), *merged]
    return m1, m2, s0, s1, s2, mask.stride(-1)


@dataclass
class MaskedCall(RowCall):
    """softmax(scale * x + mask) over the last dimension."""

    x: Tensor  # [..., S, T] with a causal mask, else [..., N]
    mask: Tensor  # broadcastable to x; x itself where there is none (CAUSAL or NONE)
    scale: float  # that fp32 can hold
    kind: str  # CAUSAL, NONE, BOOLEAN or ADDITIVE

    triton = kernels.masked_softmax_rows, kernels.masked_softmax_long_rows
    name = "masked"

    def __post_init__(self) -> None:
        operator = "causal_softmax" if self.kind == CAUSAL else "masked_softmax"
        x, mask, scale = self.x, self.mask, self.scale
        check_tensor(operator, "x", x)
        self.causal = self.kind == CAUSAL
        check_shape(operator, "x", x, x.ndim > self.causal, "[..., S, T]" if self.causal else "[..., N]")
        real = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
        check_value(operator, "scale", scale, real and -LARGEST <= scale <= LARGEST, "a number that fp32 can hold")
        self.scale: float = float(scale)
        self.has_mask: bool = self.kind in (BOOLEAN, ADDITIVE)
        if self.has_mask:
            check_tensor(operator, "mask", mask, (torch.bool, *FLOATS))
            check_device(operator, "mask", mask, "x", x)
            try:
                self.expanded: Tensor = mask.expand(x.shape)
            except RuntimeError:
                raise ValueError(
                    f"{operator}: argument 'mask' has shape {tuple(mask.shape)}; expected one that broadcasts to "
                    f"'x' {tuple(x.shape)}"
                ) from None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, torch.empty_like(self.x, device="meta")

    @property
    def mask_needs_gradient(self) -> bool:
        return self.has_mask and self.mask.requires_grad and torch.is_grad_enabled()

    @property
    def copy_needed(self) -> str:
        return MASK_COPY if self.levels is None else super().copy_needed

    @property
    def levels(self) -> tuple[int, ...] | None:
        return mask_levels(self.expanded) if self.has_mask else (1, 1, 0, 0, 0, 0)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = {BOOLEAN: 1, ADDITIVE: 2}.get(self.kind, 0)
        flags = {"MASK": mask, "CAUSAL": self.causal, "ACCURATE": self.x.dtype == torch.float32}
        return (self.n, self.s, *self.strides, *(self.levels or ()), self.scale), flags


ROWS_PER_BLOCK = {32: 4}  # by the threads of a row: four rows of one warp each share a block
MOST_ROWS = 2**31 - 1
PREFETCHED = 32  # bytes of a row that a thread holds where it loads the next row too
BLOCKS_PER_SM = 4  # at least, where rows share a mask


def faster_than_triton(c: MaskedCall | GradientCall) -> bool:
    """Each thread of a warp has an access of 16 bytes, and there is more to do than to launch."""
    return c.sm >= 90 and c.n >= 256 and c.x.numel() >= 2**20


def most_each(dtype: torch.dtype, tensors: int) -> int:
    """Elements of so many tensors that a thread has registers for."""
    return min(32, 128 // (tensors * dtype.itemsize))


def rows_unsupported(held: int, *tensors: Tensor) -> str:
    """``held``: tensors of which 1024 threads hold a row."""
    longest = 1024 * most_each(tensors[0].dtype, held)
    for t in tensors:
        rows = rows_of(t)
        if rows is None:
            return ONE_STRIDE
        m, n, row, column = rows
        count = 16 // t.element_size()
        if t.dtype != tensors[0].dtype:
            return f"a gradient of dtype {t.dtype} for a result of {tensors[0].dtype}"
        if n > longest or m > MOST_ROWS:
            return f"{m} rows of {n} columns; the kernel takes {MOST_ROWS} of {longest}"
        if n % count or (m > 1 and row % count) or (n > 1 and column != 1) or not pointer_aligned(t):
            return "rows that do not begin and end on 16 bytes"
    return ""


def masked_rows_unsupported(c: MaskedCall) -> str:
    if reason := rows_unsupported(1 + (c.kind == ADDITIVE), *c.tensors) or c.copy_needed:
        return reason
    *strides, column = (c.levels or ())[2:]
    count = 16 // c.x.element_size()
    if c.has_mask and (column != 1 or any(s % count for s in strides) or not pointer_aligned(c.mask)):
        return "a mask that does not begin on 16 bytes, rows of it that are no accesses apart, or columns not adjacent"
    return ""


def row_tiles(dtype: torch.dtype, n: int, tensors: int) -> Iterable[Config]:
    """Rows of n columns by 32 to 1024 threads that hold so many tensors."""
    for each in (4, 8, 16, 32):
        if each * dtype.itemsize >= 16 and each <= most_each(dtype, tensors) and 32 <= n // each <= 1024:
            yield {"THREADS": n // each, "EACH": each}


def row_tile(dtype: torch.dtype, n: int, tensors: int, most_threads: int = 512) -> Config:
    """32 bytes a thread and a warp at least, and at most so many threads, unless there are no registers for that."""
    few = n * dtype.itemsize <= PREFETCHED * most_threads
    each_bytes = PREFETCHED if few else n * dtype.itemsize // 512
    each = max(min(each_bytes, n * dtype.itemsize // 32), 16) // dtype.itemsize
    each = min(each, most_each(dtype, tensors))
    return {"THREADS": max(n // each, 32), "EACH": each}


def masked_rows_candidates(sm: int, dtype: torch.dtype, n: int, kind: str, shares: bool) -> Iterable[Config]:
    """Where rows share a mask, up to 16 of them one after another, the next one in flight."""
    for c in row_tiles(dtype, n, 1 + (kind == ADDITIVE)):
        prefetched = c["EACH"] * dtype.itemsize <= PREFETCHED
        yield from ({**c, "SHARE": share} for share in ((1, 2, 4, 8, 16) if shares and prefetched else (1,)))


def masked_rows_heuristic(sm: int, dtype: torch.dtype, n: int, kind: str, shares: bool) -> Config:
    c = row_tile(dtype, n, 1 + (kind == ADDITIVE), 1024 if shares else 512)
    return {**c, "SHARE": 8 if shares and c["EACH"] * dtype.itemsize <= PREFETCHED else 1}


masked_rows_configuration = Configurations(__file__, "masked_rows", masked_rows_heuristic, masked_rows_candidates)
masked_rows_backward_configuration = Configurations(
    __file__,
    "masked_rows_backward",
    lambda sm, dtype, n: row_tile(dtype, n, 2),
    lambda sm, dtype, n: row_tiles(dtype, n, 2),
)


def masked_rows_plan(kernel: str, threads: int, units: int, scalars: Sequence[Any]) -> CudaPlan:
    """Of ``units`` rows, or groups of rows that share a mask."""
    block = threads * ROWS_PER_BLOCK.get(threads, 1)
    return CudaPlan(FOLDER / "masked_rows.cu", kernel, (-(-units * threads // block), 1), block, scalars)


def launch_masked_rows(c: MaskedCall) -> CudaPlan:
    m1, m2, s0, s1, s2, _ = c.levels or (1, 1, 0, 0, 0, 0)
    shares = c.has_mask and s1 == 0 and m1 > 1
    config = masked_rows_configuration(c.x.device, c.x.dtype, bucket(c.n), c.kind, shares)
    rows = BLOCKS_PER_SM * multiprocessors(c.x.device) * ROWS_PER_BLOCK.get(config["THREADS"], 1)
    most = min(config["SHARE"], c.m // rows)
    share = max((d for d in range(1, most + 1) if m1 % d == 0), default=1)
    mask = {BOOLEAN: "Boolean", ADDITIVE: CTYPES.get(c.mask.dtype, "")}.get(c.kind, "None")
    sizes = f"{config['THREADS']}, {config['EACH']}, {share}"
    scalars = (
        *(ctypes.c_uint(v) for v in (c.m, c.n, c.s, m1, m2)),
        *(ctypes.c_longlong(v) for v in (*c.row_strides, s0, s1, s2)),
        ctypes.c_float(c.scale),
    )
    kernel = f"masked_softmax<{CTYPES[c.x.dtype]}, {mask}, {flags(c.causal)}, {sizes}>"
    return masked_rows_plan(kernel, config["THREADS"], c.m // share, scalars)


def launch_causal_backward(c: GradientCall) -> CudaPlan:
    config = masked_rows_backward_configuration(c.x.device, c.x.dtype, bucket(c.n))
    scalars = (*map(ctypes.c_uint, (c.m, c.n, c.s)), *map(ctypes.c_longlong, c.row_strides), ctypes.c_float(c.scale))
    kernel = f"causal_softmax_backward<{CTYPES[c.x.dtype]}, {config['THREADS']}, {config['EACH']}>"
    return masked_rows_plan(kernel, config["THREADS"], c.m, scalars)


def causal_backward_unsupported(c: GradientCall) -> str:
    return rows_unsupported(2, *c.tensors) if c.causal else "no causal mask"


HELD_BY_BLOCK = "a block holds a row in registers, and computes only what the row sees"

MASKED_FORWARD = Dispatch(
    MaskedCall,
    ON_CPU,
    TRACED,
    EMPTY,
    Route("torch", lambda c: c.levels is None, MASK_COPY),
    Route("torch", lambda c: c.copy_needed or side_by_side(c.x), COPIED),
    Route("torch", lambda c: c.mask_needs_gradient, "the mask needs a gradient, for which there is no kernel of ours"),
    Route("cuda", faster_than_triton, HELD_BY_BLOCK, launch_masked_rows, masked_rows_unsupported),
    *TRITON,
)

MASKED_BACKWARD = Dispatch(
    masked_gradient,
    Route("cuda", faster_than_triton, HELD_BY_BLOCK, launch_causal_backward, causal_backward_unsupported),
    *TRITON,
)
