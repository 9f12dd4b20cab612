"""The plan of ``group_gradient.cu``: the gradient of GroupNorm with groups spread over clusters of blocks (sm_90 and later)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import partial_sums, row_cluster
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plans
from weft.operators.normalization.group_cluster import rows_of_groups
from weft.operators.row_cluster import MAX_CLUSTER

SOURCE = Path(__file__).parent / "group_gradient.cu"
LEAST_SPACE = 128  # elements of a channel below which a warp would go through too many channels
WARP = 32


def held(dtype: torch.dtype) -> int:
    """Elements of x, and as many of dy, that a thread holds: 64 bytes of each, half of its registers; with 64 of fp32 some
    were spilled."""
    return 32 if dtype.itemsize == 2 else 12


def longest(dtype: torch.dtype) -> int:
    """Elements of a group."""
    return 1024 * held(dtype) * MAX_CLUSTER


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """At most 512 threads a block where that is enough, so that two or more share a multiprocessor."""
    return {"THREADS": 512 if 2 * n <= longest(dtype) else 1024, "EACH": held(dtype)}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    each = held(dtype)
    for c in grid_of({"THREADS": (128, 256, 512, 1024), "EACH": (16 if each == 32 else 8, each)}):
        if n <= c["THREADS"] * c["EACH"] * MAX_CLUSTER:
            yield c


configuration = Configurations(__file__, "group_gradient", heuristic, candidates)


class Spread(NamedTuple):
    """A group over the blocks of a cluster."""

    blocks: int
    share: int  # elements of a block, whole vectors
    threads: int  # that hold them
    slots: int  # blocks that a channel may touch
    channels: int  # that a share may touch
    shared: int  # bytes


def spread(n: int, space: int, dtype: torch.dtype, config: Config) -> Spread:
    """Of a group of n elements, in channels of ``space``: even shares, and whole warps that are enough for one."""
    count, piece = 16 // dtype.itemsize, WARP * config["EACH"]
    blocks = bucket(-(-n // (config["THREADS"] * config["EACH"])))
    share = -(-n // (blocks * count)) * count
    warps = -(-share // piece)
    slots = max((c * space + space - 1) // share - c * space // share + 1 for c in range(n // space))
    channels = min(share // space + 2, n // space)
    return Spread(blocks, share, warps * WARP, slots, channels, warps * 8 + channels * 12)


def why_not(x: Tensor, dy: Tensor, weight: Tensor | None, groups: int) -> str:
    """Why the kernel does not take these (an empty string when it does)."""
    if not (x.is_contiguous() and dy.is_contiguous()) or dy.dtype != x.dtype:
        return "it takes contiguous tensors of one dtype"
    if weight is not None and weight.stride(0) != 1 and len(weight) > 1:
        return "a weight that is not contiguous"
    for t in (x, dy):
        if reason := row_cluster.why_not(rows_of_groups(t, groups)):
            return f"groups: {reason}"
    n, space = x[0].numel() // groups, x.shape[2:].numel()
    if n > longest(x.dtype):
        return f"{n} elements a group; a cluster of {MAX_CLUSTER} blocks holds {longest(x.dtype)}"
    if space < LEAST_SPACE or space * x.element_size() % 16:
        return f"channels of {space} elements; it takes {LEAST_SPACE} and more, whole multiples of 16 bytes"
    return ""


class GradientPlan:
    """As ``group_plans.BackwardPlan``, which is called with the same; of ``(x, dy, like, groups, weighted, summed)``. Raises
    Declined as :func:`why_not` says."""

    def __init__(self, x: Tensor, dy: Tensor, like: Tensor, groups: int, weighted: bool, summed: bool):
        if reason := why_not(x, dy, like if weighted else None, groups):
            raise Declined(reason)
        channels, space = x.shape[1], x.shape[2:].numel()
        m, n = rows_of_groups(x, groups).shape
        config = configuration(x.device, x.dtype, bucket(n))
        over = spread(n, space, x.dtype, config)
        flags = f"{str(weighted).lower()}, {str(summed).lower()}"
        sizes = f"{over.threads}, {config['EACH']}"
        kernel = f"group_norm_gradient<{CTYPES[x.dtype]}, {CTYPES[like.dtype]}, {sizes}, {flags}>"
        numbers = (over.share, groups, channels // groups, space, over.slots, over.channels)
        slot = m * (channels // groups)
        scalars = (*map(ctypes.c_longlong, (n, slot)), *(ctypes.c_uint(v) for v in numbers), ctypes.c_float(1 / n))
        self.launch = CudaPlan(SOURCE, kernel, (m * over.blocks, 1), over.threads, scalars, over.blocks, over.shared)
        self.partial, self.summed = (2, over.slots * x.shape[0], channels), summed
        self.total = partial_sums.plan(self.partial[1], channels, 2)

    def __call__(
        self, x: Tensor, dy: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dx: Tensor, dweights: Tensor
    ) -> None:
        partial = torch.empty(self.partial if self.summed else (2, 0), dtype=torch.float32, device=x.device)
        self.launch(x, dy, weight, mean, rstd, dx, partial[0], partial[1])
        if self.summed:
            self.total(partial, dweights)


plans = Plans(GradientPlan)
