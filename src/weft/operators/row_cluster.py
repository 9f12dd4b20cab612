"""Rows spread over clusters of blocks: what the launches of the kernels on ``rows.cuh`` share."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, bucket, grid_of
from weft.operators.cuda import pointer_aligned
from weft.operators.layout import rows_of

MAX_CLUSTER = 16
SHORTEST = 2048  # columns below which a block per row leaves most of a multiprocessor idle
LONGEST = 2**19  # columns that 16 blocks of 1024 threads hold
REASON = "a cluster of blocks holds a row"


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """128 bytes a thread; the fewest blocks a cluster with at most 512 threads each, so that two share a multiprocessor."""
    each = 128 // dtype.itemsize
    threads = next((t for t in (128, 256, 512) if n <= t * each), 512)
    return {"THREADS": threads if n <= threads * each * MAX_CLUSTER else 1024, "EACH": each}


def candidates(
    sm: int, dtype: torch.dtype, n: int, most_bytes: int = 128, threads: tuple[int, ...] = (128, 256, 512, 1024)
) -> Any:
    """At most so many bytes a thread, or half of them."""
    each = most_bytes // dtype.itemsize
    for c in grid_of({"THREADS": threads, "EACH": (each // 2, each)}):
        if n <= c["THREADS"] * c["EACH"] * MAX_CLUSTER and n * 2 > c["THREADS"] * c["EACH"]:
            yield c


@dataclass(frozen=True)
class RowCluster:
    """Grid and cluster for x [M, N] → ``torch.empty_like(x)``, the kernel's template arguments (THREADS, EACH) and its
    scalars (N and the row strides)."""

    grid: tuple[int, int]
    threads: int
    elements: int  # that a block holds
    cluster: int
    template: str
    scalars: tuple[Any, ...]

    @classmethod
    def of(cls, x: Tensor, config: Config) -> "RowCluster":
        """Raises Declined where :func:`why_not` says so."""
        if reason := why_not(x):
            raise Declined(reason)
        m, n, x_row, _ = rows_of(x) or (0, 0, 0, 0)
        _, _, y_row, _ = rows_of(torch.empty_like(x, device="meta")) or (0, 0, 0, 0)
        threads, each = config["THREADS"], config["EACH"]
        cluster = bucket(-(-n // (threads * each)))
        if cluster > MAX_CLUSTER:
            raise Declined(f"{n} columns; a cluster of {MAX_CLUSTER} blocks holds {threads * each * MAX_CLUSTER}")
        scalars = tuple(ctypes.c_longlong(v) for v in (n, x_row, y_row))
        return cls((m * cluster, 1), threads, threads * each, cluster, f"{threads}, {each}", scalars)


def why_not(x: Tensor) -> str:
    """Why rows of x's last dimension cannot be read 16 bytes at a time (an empty string when they can)."""
    rows = rows_of(x)
    if rows is None:
        return "the leading dimensions do not collapse into rows of one stride, so a copy would be needed"
    _, n, row, column = rows
    count = 16 // x.element_size()
    if column != 1 and n > 1:
        return f"columns {column} elements apart; 16-byte accesses need adjacent ones"
    if n % count or row % count or not pointer_aligned(x):
        return "rows that do not begin and end on 16 bytes"
    if n < SHORTEST:
        return f"{n} columns; below {SHORTEST} a block would hold too little of a row"
    if n > LONGEST:
        return f"{n} columns; a cluster of {MAX_CLUSTER} blocks holds {LONGEST}"
    return ""
