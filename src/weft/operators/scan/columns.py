"""The plans of ``columns.cu`` and ``logarithm_columns.cu``: scans along an axis beside which elements lie side by side."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plan, multiprocessors
from weft.operators.reduction.views import View
from weft.operators.scan import kernels
from weft.operators.scan.vectors import LONGEST, longs, one_grid

STEPS = 4  # of a part of N, at least
RESIDENT = 512  # threads at a time on a multiprocessor, which the kernels of scans say
LIMIT = 2**30  # elements of a column, which a kernel counts in 32 bits
SIDE = 8  # vectors of 16 bytes side by side, in a block that is no larger than a warp


@dataclass(frozen=True)
class Kernel:
    """What scans columns of one formula.

    Args:
        source: the name of its file.
        name: with its first template arguments, ``{}`` for an element.
        across: vectors of 16 bytes side by side in a block, of 32 and of 16 bits an element.
        held: bytes of x that a thread has in a step, likewise.
        scaled: totals of parts are products beside powers of two.
    """

    source: str
    name: str
    across: tuple[int, int]
    held: tuple[int, int]
    scaled: bool = False

    # ACROSS vectors of 16 bytes side by side, at most; ROWS of a thread in a step; THREADS of a block.

    def heuristic(self, sm: int, dtype: torch.dtype, n: int) -> Config:
        """At 512 threads 32 or 64 KiB on their way to a multiprocessor."""
        of = dtype.itemsize == 2
        return {"ACROSS": self.across[of], "ROWS": self.held[of] // 16, "THREADS": 256}

    def candidates(self, sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
        most = self.held[dtype.itemsize == 2] // 16
        yield from grid_of({"ACROSS": (4, 8, 16, 32), "ROWS": (most // 2, most), "THREADS": (128, 256)})


# ---- plans -----------------------------------------------------------------------------------------------------------


def why_not(views: Sequence[View], dtype: torch.dtype, *tensors: Tensor) -> str:
    """Why tensors cannot be taken 16 bytes of columns at a time (an empty string when they can).

    Args:
        views: of the tensors, and of results like them, as [M, N, K].
        dtype: of all results.
    """
    v, count = views[0], 16 // tensors[0].element_size()
    if any(t.dtype != dtype for t in tensors):
        return "a result of another dtype than x"
    if any(view.k != 1 for view in views):
        return "neither elements along 'dim' nor those beside them lie side by side"
    apart = [stride for view in views for extent, stride in ((v.M, view.m), (v.N, view.n)) if extent > 1]
    if v.K % count or any(stride % count for stride in apart) or not all(map(pointer_aligned, tensors)):
        return "columns that do not begin and end on 16 bytes"
    if v.N > LIMIT:
        return f"{v.N} elements along 'dim'; columns are counted up to {LIMIT}"
    return ""


def too_few(v: View, x: Tensor) -> bool:
    """Whether there are columns, and so few rows that most threads of a warp would find none."""
    return v.K > 1 and 8 * 32 // min(SIDE, bucket(v.K * x.element_size() // 16)) > 2 * v.N


@dataclass(frozen=True)
class Walk:
    """How blocks walk down the columns of [M, N, K].

    Args:
        across: vectors of 16 bytes side by side in a block.
        rows: of a thread in a step.
        threads: of a block.
        blocks: in all.
        each: rows of a part of N.
        parts: of N.
    """

    across: int
    rows: int
    threads: int
    blocks: int
    each: int
    parts: int

    @classmethod
    def of(cls, v: View, x: Tensor, config: Config, resident: int, *, cut: bool = True) -> Walk:
        """Args: resident: threads at a time on a multiprocessor; cut: N may be cut into parts, for more blocks."""
        vectors = v.K * x.element_size() // 16
        across, rows, threads = min(config["ACROSS"], bucket(vectors)), config["ROWS"], config["THREADS"]
        while threads > 32 and threads // across * rows >= 2 * v.N:
            threads = max(threads // 64, 1) * 32
        step = threads // across * rows
        blocks = v.M * -(-vectors // across)
        most = resident // threads * multiprocessors(x.device)  # blocks that run at a time
        parts = max(min(most // blocks, v.N // (STEPS * step)), 1) if cut and 3 * blocks <= most else 1
        each = -(-v.N // (parts * step)) * step
        parts = -(-v.N // each)
        return cls(across, rows, threads, one_grid(blocks * parts), each, parts)

    def launch(self, source: str, kind: str, scalars: tuple[Any, ...], *more: int) -> CudaPlan:
        """Args: kind: the kernel with its template arguments up to those of the walk; more: those behind them."""
        numbers = ", ".join(map(str, (self.across, self.rows, self.threads, *more)))
        return CudaPlan(Path(__file__).parent / source, f"{kind}, {numbers}>", (self.blocks, 1), self.threads, scalars)

    def scalars(self, v: View, *views: View) -> tuple[Any, ...]:
        """N, K, each, parts, and the strides of each view along M and N."""
        strides = longs(*(stride for view in views for stride in (view.m, view.n)))
        return (ctypes.c_int(v.N), *longs(v.K), ctypes.c_int(self.each), ctypes.c_int(self.parts), *strides)


def carry_products(v: View, parts: int, reverse: bool = False) -> Plan:
    """From the totals of so many parts of each column of [M, N, K], beside powers of two, to the products before them.
    Args: reverse: parts count from the other end of N than the scan."""
    tile = {"REVERSE": reverse, "BLOCK": bucket(parts)}
    return Plan(kernels.carry_products, (v.M * v.K,), (v.K, parts, v.M * v.K), tile, 4)


class ColumnsPlan:
    """A scan of columns: call with ``(x, y)``. One launch, or three where M and K alone give too few blocks: what each part of
    N comes to, what comes before each, and the parts, which read x a second time."""

    def __init__(
        self, v: View, y: View, x: Tensor, dtype: torch.dtype, kernel: Kernel, configured: Configurations, *,
        exclusive: bool, reverse: bool, cut: bool = True,
    ):  # fmt: skip
        """Args: cut: N may be cut into parts. Raises Declined as :func:`why_not` says."""
        if reason := why_not((v, y), dtype, x):
            raise Declined(reason)
        walk = Walk.of(v, x, configured(x.device, x.dtype, min(bucket(v.N), LONGEST)), RESIDENT, cut=cut)
        self.shape, self.scaled = (v.M, walk.parts, v.K), kernel.scaled
        kind = f"{kernel.name.format(CTYPES[x.dtype])}, {str(reverse).lower()}, {str(exclusive).lower()}"
        scalars = walk.scalars(v, v, y)
        self.scan = walk.launch(kernel.source, f"{kind}, {'WHOLE' if walk.parts == 1 else 'CARRIED'}", scalars)
        self.totals = walk.launch(kernel.source, f"{kind}, TOTALS", scalars)
        self.carries: ColumnsPlan | Plan | None = None
        if walk.parts > 1 and kernel.scaled:
            self.carries = carry_products(v, walk.parts)
        elif walk.parts > 1:
            between = View(*self.shape, walk.parts * v.K, v.K, 1)
            memory = torch.empty(0, dtype=torch.float32, device=x.device)
            how = {"exclusive": True, "reverse": False, "cut": False}
            self.carries = ColumnsPlan(between, between, memory, torch.float32, kernel, configured, **how)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        carry = totals = x
        if self.carries is not None:
            carry, *_ = between = torch.empty((2 + self.scaled, *self.shape), dtype=torch.float32, device=x.device)
            totals = between[1:]
            self.totals(x, carry, y, totals)
            self.carries(totals, carry)
        self.scan(x, carry, y, totals)
