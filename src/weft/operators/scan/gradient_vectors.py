"""The plans of ``gradient.cu``: gradients of products and of logarithms of sums along rows of adjacent elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plan, target_sm
from weft.operators.reduction.views import View
from weft.operators.scan import kernels
from weft.operators.scan.vectors import LONGEST, MAX_CLUSTER, longs, one_grid, warps_of

SOURCE = Path(__file__).parent / "gradient.cu"
PART, MOST_PARTS = 2**16, 2**13  # elements of a part of a row that no cluster holds, at least; parts of a row
NAMES = ("x", "y", "dy", "dx")


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """32 bytes a thread of each of three tensors: at 1024 threads 96 KiB on their way to a multiprocessor. Several blocks take
    a row only where one cannot."""
    return {"BYTES": 32, "THREADS": min(max(128, 32 * warps_of(n * dtype.itemsize, 32)), 512)}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    for c in grid_of({"BYTES": (16, 32, 64), "THREADS": (128, 256, 512)}):
        if 32 * warps_of(min(n, PART) * dtype.itemsize, c["BYTES"]) <= c["THREADS"] * (MAX_CLUSTER if sm >= 90 else 1):
            yield c


def why_not(views: Sequence[View], tensors: Sequence[Tensor]) -> str:
    """Why x, y, dy and dx cannot be taken 16 bytes at a time (an empty string when they can)."""
    count = 16 // tensors[0].element_size()
    for name, v, t in zip(NAMES, views, tensors, strict=True):
        if t.dtype != tensors[0].dtype:
            return f"{name} of another dtype than x"
        if v.K != 1 or v.n != 1:
            return "elements along 'dim' that do not lie side by side"
        if v.N % count or (v.M > 1 and v.m % count) or not pointer_aligned(t):
            return f"rows of {name} that do not begin and end on 16 bytes"
    if target_sm(tensors[0].device) < 90:
        return "rows that take several blocks tell each other what they found, which comes with sm_90"
    return ""


class VectorsGradientPlan:
    """The gradient of a scan of rows: call with ``(x, y, dy, dx)``. One launch, or three where no cluster holds a row: the step
    that each part of it comes to, what these carry to each part, and the parts."""

    def __init__(
        self, views: Sequence[View], tensors: Sequence[Tensor], configured: Configurations, *, log: bool,
        exclusive: bool, reverse: bool,
    ):  # fmt: skip
        """Args: reverse: of the scan. Raises Declined as :func:`why_not` says."""
        if reason := why_not(views, tensors):
            raise Declined(reason)
        x, v = tensors[0], views[0]
        config = configured(x.device, x.dtype, min(bucket(v.N), LONGEST))
        count = 16 // x.element_size()
        held = config["BYTES"] // 16
        needed = warps_of(v.N * x.element_size(), config["BYTES"])
        whole = 32 * needed <= MAX_CLUSTER * config["THREADS"]
        each = v.N if whole else max(PART, -(-v.N // MOST_PARTS // count) * count)
        self.parts, self.rows = -(-v.N // each), v.M
        vectors = -(-each // count)
        lanes = min(bucket(-(-vectors // held)), 32)
        held = min(held, -(-vectors // lanes))
        needed = bucket(-(-vectors // (lanes * held)))
        warps = min(needed, config["THREADS"] // 32)
        cluster, side = needed // warps, 32 // lanes
        if cluster > MAX_CLUSTER:
            raise Declined(f"rows of {v.N} elements, in parts of which a cluster holds none")
        teams = config["THREADS"] // (32 * warps)
        blocks = one_grid(cluster * -(-v.M * self.parts // (teams * side)))
        kind = ", ".join((CTYPES[x.dtype], *(str(yes).lower() for yes in (log, not reverse, exclusive))))
        scalars = longs(v.M * self.parts, v.N, each, self.parts, *(view.m for view in views))

        def launch(mode: str) -> CudaPlan:
            kernel = f"scan_gradient<{kind}, {mode}, {lanes}, {held}, {warps}, {config['THREADS']}, {cluster}>"
            return CudaPlan(SOURCE, kernel, (blocks, 1), config["THREADS"], scalars, cluster)

        self.gradient = launch("WHOLE" if self.parts == 1 else "CARRIED")
        self.totals = launch("TOTALS")
        tile = {"REVERSE": not reverse, "BLOCK": bucket(self.parts)}
        self.carries = Plan(kernels.carry_parts, (v.M,), (1, self.parts), tile, 4)

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
        carry = totals = scales = x
        if self.parts > 1:
            every = torch.empty((3, self.rows * self.parts), dtype=torch.float32, device=x.device)
            totals, scales, carry = every.unbind(0)
            self.totals(x, y, dy, carry, totals, scales, dx)
            self.carries(totals, scales, carry)
        self.gradient(x, y, dy, carry, totals, scales, dx)
