"""The plans of ``logarithm_columns.cu``: logarithms of running sums along an axis beside which elements lie side by side."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import multiprocessors
from weft.operators.reduction.views import View
from weft.operators.scan.vectors import LONGEST, longs, one_grid

SOURCE = Path(__file__).parent / "logarithm_columns.cu"
STEPS = 4  # of a part of N, at least

# ---- configurations --------------------------------------------------------------------------------------------------
# ACROSS vectors of 16 bytes side by side, at most; ROWS of a thread in a step; THREADS of a block.


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """32 elements a thread, 128 bytes side by side: at 512 threads 32 or 64 KiB on their way to a multiprocessor."""
    return {"ACROSS": 8, "ROWS": 2 * dtype.itemsize, "THREADS": 256}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    yield from grid_of({"ACROSS": (4, 8, 16, 32), "ROWS": (dtype.itemsize, 2 * dtype.itemsize), "THREADS": (128, 256)})


# ---- plans -----------------------------------------------------------------------------------------------------------


def why_not(v: View, y: View, x: Tensor, dtype: torch.dtype) -> str:
    """Why x cannot be taken 16 bytes of columns at a time (an empty string when it can).

    Args:
        v, y: x and the result as [M, N, K].
        dtype: of the result.
    """
    count = 16 // x.element_size()
    if dtype != x.dtype:
        return "a result of another dtype than x"
    if v.k != 1 or y.k != 1:
        return "neither elements along 'dim' nor those beside them lie side by side"
    apart = [stride for view in (v, y) for extent, stride in ((v.M, view.m), (v.N, view.n)) if extent > 1]
    if v.K % count or any(stride % count for stride in apart) or not pointer_aligned(x):
        return "columns that do not begin and end on 16 bytes"
    if v.N >= 2**31:
        return f"{v.N} elements along 'dim'; columns are counted up to 2**31"
    return ""


class ColumnsPlan:
    """A scan of columns: call with ``(x, y)``. One launch, or three where M and K alone give too few blocks: what each part of
    N comes to, what comes before each, and the parts, which read x a second time."""

    def __init__(
        self, v: View, y: View, x: Tensor, dtype: torch.dtype, configured: Configurations, *, exclusive: bool,
        reverse: bool, cut: bool = True,
    ):  # fmt: skip
        """Args: cut: N may be cut into parts. Raises Declined as :func:`why_not` says."""
        if reason := why_not(v, y, x, dtype):
            raise Declined(reason)
        config = configured(x.device, x.dtype, min(bucket(v.N), LONGEST))
        vectors = v.K * x.element_size() // 16
        across, rows, threads = min(config["ACROSS"], bucket(vectors)), config["ROWS"], config["THREADS"]
        step = threads // across * rows
        blocks = v.M * -(-vectors // across)
        most = 512 // threads * multiprocessors(x.device)  # blocks that run at a time
        parts = max(min(most // blocks, v.N // (STEPS * step)), 1) if cut and 3 * blocks <= most else 1
        each = -(-v.N // (parts * step)) * step
        self.shape = (v.M, -(-v.N // each), v.K)
        kind = f"{CTYPES[x.dtype]}, {str(reverse).lower()}, {str(exclusive).lower()}"
        parts = self.shape[1]
        numbers = (ctypes.c_int(v.N), *longs(v.K), ctypes.c_int(each), ctypes.c_int(parts))
        scalars = (*numbers, *longs(v.m, v.n, y.m, y.n))

        def launch(mode: str) -> CudaPlan:
            kernel = f"log_columns<{kind}, {mode}, {across}, {rows}, {threads}>"
            return CudaPlan(SOURCE, kernel, (one_grid(blocks * parts), 1), threads, scalars)

        self.scan = launch("WHOLE" if parts == 1 else "CARRIED")
        self.totals = launch("TOTALS")
        self.carries: ColumnsPlan | None = None
        if parts > 1:
            between = View(*self.shape, parts * v.K, v.K, 1)
            memory = torch.empty(0, dtype=torch.float32, device=x.device)
            how = {"exclusive": True, "reverse": False, "cut": False}
            self.carries = ColumnsPlan(between, between, memory, torch.float32, configured, **how)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        carry = totals = x
        if self.carries is not None:
            totals, carry = torch.empty((2, *self.shape), dtype=torch.float32, device=x.device).unbind(0)
            self.totals(x, carry, y, totals)
            self.carries(totals, carry)
        self.scan(x, carry, y, totals)
