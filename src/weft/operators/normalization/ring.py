"""How the kernels on ``backward.cuh`` lay rows over clusters of blocks, each with a ring buffer of row slices in shared memory.

Used by the gradients of the norms (``dispatch.py``) and of dropout + residual + RMSNorm (``dropout/dispatch.py``).
"""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.operators.configs import Config, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned, resident, shared_limit
from weft.operators.launch import target_sm
from weft.operators.layout import rows_of
from weft.operators.row_cluster import MAX_CLUSTER

SHORTEST = 256  # columns: one 16-byte vector for each thread of a warp
SYSTEM = 1024  # bytes of shared memory that CUDA reserves for a block
REGISTERS = 65536  # of a multiprocessor
UNALIGNED = "rows that do not begin and end on 16 bytes"


def own_bytes(rows: int, threads: int) -> int:
    """Shared memory of a block besides the ring and the weight: CUDA's, barriers, sums."""
    return SYSTEM + 256 + rows * (512 + threads // 2)


def registers(each: int, rows: int, dtype: torch.dtype, centered: bool) -> int:
    """An estimate for a thread: its partial sums (in fp32 with their compensation), the sums of each row, and the rest."""
    return each * (2 if centered else 1) * (2 if dtype == torch.float32 else 1) + 34 + 10 * rows


def fits(sm: int, c: Config, dtype: torch.dtype, n: int, centered: bool, tensors: int = 2) -> bool:
    """Whether a multiprocessor's registers and shared memory hold PER_SM blocks, and 16 blocks hold a row of each tensor."""
    slice_, item = c["THREADS"] * c["EACH"], dtype.itemsize
    shared = (c["STAGES"] * c["ROWS"] * tensors + 1) * slice_ * item + own_bytes(c["ROWS"], c["THREADS"])
    enough = c["THREADS"] * registers(c["EACH"], c["ROWS"], dtype, centered) * c["PER_SM"] <= REGISTERS
    return enough and shared * c["PER_SM"] <= shared_limit(sm) + SYSTEM and n <= slice_ * MAX_CLUSTER


def candidates(sm: int, dtype: torch.dtype, n: int, centered: bool, tensors: int = 2) -> Iterable[Config]:
    """Slices of a row, rows of a group, stages of the ring, and as many blocks a multiprocessor as fit, or half of them."""
    vector = 16 // dtype.itemsize
    choices = {
        "THREADS": (32, 64, 128, 256, 512, 1024),
        "EACH": (vector, 2 * vector, 4 * vector),
        "ROWS": (1, 2, 4),
        "STAGES": (3, 4, 6),
    }
    for c in grid_of(choices):
        slice_ = c["THREADS"] * c["EACH"]
        if slice_ >= 2 * n and slice_ > 32 * vector:
            continue
        if c["ROWS"] * slice_ * dtype.itemsize > 32 * 1024 or (c["ROWS"] > 1 and c["STAGES"] > 4):
            continue  # enough bytes are in flight without
        blocks = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        most = max((p for p in blocks if fits(sm, {**c, "PER_SM": p}, dtype, n, centered, tensors)), default=0)
        for per_sm in dict.fromkeys((most, (most + 1) // 2)):
            in_flight = (c["STAGES"] - 1) * c["ROWS"] * tensors * slice_ * dtype.itemsize * per_sm
            if per_sm and 256 <= c["THREADS"] * per_sm <= 2048 and in_flight >= 32 * 1024:
                yield {**c, "PER_SM": per_sm}


def heuristic(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Config:
    """The fewest blocks a row with at least 512 threads and 64 KiB in flight on a multiprocessor; two rows a group in 16 bits,
    where instructions are the limit."""
    pair = 2 if dtype.itemsize == 2 else 1

    def rank(c: Config) -> tuple[int, ...]:
        slice_ = c["THREADS"] * c["EACH"]
        busy = c["THREADS"] * c["PER_SM"] >= 512
        in_flight = (c["STAGES"] - 1) * c["ROWS"] * 2 * slice_ * dtype.itemsize * c["PER_SM"] >= 64 * 1024
        shape = (bucket(-(-n // slice_)), abs(c["ROWS"] - pair), c["EACH"], c["STAGES"], -c["PER_SM"])
        return (-int(busy and in_flight), *shape)

    return min(candidates(sm, dtype, n, centered), key=rank)


@functools.cache
def longest(sm: int, dtype: torch.dtype, centered: bool) -> int:
    """Columns of the longest row whose partial sums fit registers and shared memory."""
    return next(2**e for e in range(18, -1, -1) if any(True for _ in candidates(sm, dtype, 2**e, centered)))


class Layout(NamedTuple):
    """How a row lies over blocks, and the shared memory of the ring."""

    cluster: int  # blocks that share a row
    rows: int  # of a group
    stages: int
    shared: int  # bytes


def layout(sm: int, config: Config, dtype: torch.dtype, n: int, tensors: int, weight_bytes: int) -> Layout | None:
    """Of a configuration, so many tensors that are read and ``weight_bytes`` for an element of the weight (0: none). None where
    shared memory does not hold even one row a group."""
    slice_ = config["THREADS"] * config["EACH"]
    row = slice_ * tensors * dtype.itemsize
    # with a third tensor, or a float32 weight, what was measured for two may not fit
    for rows in (r for r in (4, 2, 1) if r <= config["ROWS"]):
        room = shared_limit(sm) + SYSTEM - own_bytes(rows, config["THREADS"]) - slice_ * weight_bytes
        stages = min(config["STAGES"], room // (rows * row))
        if stages >= 3:
            return Layout(bucket(-(-n // slice_)), rows, stages, stages * rows * row + slice_ * weight_bytes)
    return None


class OneCluster(NamedTuple):
    """The launch of one cluster, and the rows of a group."""

    plan: CudaPlan
    group: int


def one_cluster(
    source: Path, kernel: str, x: Tensor, weight: Tensor, config: Config, tensors: int, weight_bytes: int,
    known: Iterable[bool], scalars: tuple[Any, ...],
) -> OneCluster | None:  # fmt: skip
    """None where shared memory does not hold one group of x's rows."""
    found = layout(target_sm(x.device), config, x.dtype, x.shape[-1], tensors, weight_bytes)
    if found is None:
        return None
    sizes = (config["THREADS"], config["EACH"], found.rows, found.stages, config["PER_SM"])
    words = (CTYPES[x.dtype], CTYPES[weight.dtype], *map(str, sizes), flags(*known))
    expression, grid = f"{kernel}<{', '.join(words)}>", (found.cluster, 1)
    plan = CudaPlan(source, expression, grid, config["THREADS"], scalars, found.cluster, found.shared)
    return OneCluster(plan, found.rows)


def all_clusters(one: OneCluster | None, x: Tensor) -> tuple[CudaPlan, int]:
    """The launch of as many clusters as run at once, one for each group of x's rows at most, and how many they are."""
    assert one is not None  # it is supported
    clusters = min(-(-(x.numel() // x.shape[-1]) // one.group), resident(one.plan, x.device))
    return dataclasses.replace(one.plan, grid=(clusters * one.plan.cluster, 1)), clusters


def unsupported(x: Tensor, *others: Tensor, weight: Tensor | None, centered: bool) -> str:
    """Why no kernel on ``backward.cuh`` can take these rows (an empty string when one can)."""
    for t in (x, *others):
        rows, count = rows_of(t), 16 // t.element_size()
        if rows is None or not pointer_aligned(t):
            return UNALIGNED
        _, n, row, column = rows
        if (column != 1 and n > 1) or n % count or row % count:
            return UNALIGNED
    if weight is not None and weight.is_contiguous() and not pointer_aligned(weight):  # a strided one is copied
        return "a weight that does not begin on 16 bytes"
    n, most = x.shape[-1], longest(target_sm(x.device), x.dtype, centered)
    return "" if SHORTEST <= n <= most else f"{n} columns; it takes {SHORTEST} … {most}"
