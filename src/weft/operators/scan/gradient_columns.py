"""The plans of ``gradient_columns.cu``: gradients of products and of logarithms of sums down columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plan
from weft.operators.reduction.views import View
from weft.operators.scan import columns, kernels
from weft.operators.scan.columns import Walk
from weft.operators.scan.vectors import LONGEST

SOURCE = "gradient_columns.cu"

# ACROSS, ROWS, THREADS as of columns.Kernel.


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """48 KiB of three tensors on their way to a multiprocessor."""
    if dtype == torch.float32:
        return {"ACROSS": 16, "ROWS": 2, "THREADS": 256}
    return {"ACROSS": 8, "ROWS": 4, "THREADS": 128}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    yield from grid_of({"ACROSS": (4, 8, 16), "ROWS": (2, 4), "THREADS": (128, 192, 256)})


def resident(dtype: torch.dtype, rows: int) -> int:
    """Threads at a time on a multiprocessor, by the registers that they need."""
    return 256 if rows > 2 else 512 if dtype == torch.float32 else 384


class ColumnsGradientPlan:
    """The gradient of a scan of columns: call with ``(x, y, dy, dx)``. One launch, or three where M and K alone give too few
    blocks: the step that each part of N comes to, what these carry to each part, and the parts."""

    def __init__(
        self, views: Sequence[View], tensors: Sequence[Tensor], configured: Configurations, *, log: bool,
        exclusive: bool, reverse: bool,
    ):  # fmt: skip
        """Args: reverse: of the scan. Raises Declined as ``columns.why_not`` says."""
        x, v = tensors[0], views[0]
        if reason := columns.why_not(views, x.dtype, *tensors):
            raise Declined(reason)
        config = configured(x.device, x.dtype, min(bucket(v.N), LONGEST))
        threads = resident(x.dtype, config["ROWS"])
        walk = Walk.of(v, x, config, threads)
        self.shape = (v.M, walk.parts, v.K)
        kind = ", ".join((CTYPES[x.dtype], *(str(yes).lower() for yes in (log, not reverse, exclusive))))
        scalars = walk.scalars(v, *views)

        def launch(mode: str) -> CudaPlan:
            return walk.launch(SOURCE, f"gradient_columns<{kind}, {mode}", scalars, threads // walk.threads)

        self.gradient = launch("WHOLE" if walk.parts == 1 else "CARRIED")
        self.totals = launch("TOTALS")
        tile = {"REVERSE": False, "BLOCK": bucket(walk.parts)}
        self.carries = Plan(kernels.carry_parts, (v.M * v.K,), (v.K, walk.parts), tile, 4)

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
        carry = totals = scales = x
        if self.shape[1] > 1:
            every = torch.empty((3, *self.shape), dtype=torch.float32, device=x.device)
            totals, scales, carry = every.unbind(0)
            self.totals(x, y, dy, carry, totals, scales, dx)
            self.carries(totals, scales, carry)
        self.gradient(x, y, dy, carry, totals, scales, dx)
