"""The plans of ``cluster_backward.cu``: the gradients of softmax and log-softmax with a row spread over a cluster of blocks
(sm_90 and later)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import row_cluster
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plans, target_sm
from weft.operators.residency import shared_limit
from weft.operators.row_cluster import LONGEST, MAX_CLUSTER, RowCluster

SOURCE = Path(__file__).parent / "cluster_backward.cu"
FROM = 16384  # columns from which it takes over from the Triton kernels (README.md)
OWN = 2048  # bytes of shared memory that a block takes besides dy: barrier and sums, and what the system takes
# Blocks of so many threads make clusters of at most so many before larger ones are taken; two of 512 share a multiprocessor.
CLUSTERS = {128: 4, 256: 8, 512: 16, 1024: 16}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    """Slices of a row by blocks, and where dy lies: SHARED memory or registers, of which a thread spends 64 or 128 bytes."""
    for c in grid_of({"THREADS": (128, 256, 512, 1024), "BYTES": (32, 64, 128), "SHARED": (0, 1)}):
        held, registers = c["THREADS"] * c["BYTES"], c["BYTES"] * (2 - c["SHARED"])
        fits = held * c["SHARED"] + OWN <= shared_limit(sm)
        if registers in (64, 128) and fits and held < 2 * n * dtype.itemsize <= 2 * held * MAX_CLUSTER:
            yield {"THREADS": c["THREADS"], "EACH": c["BYTES"] // dtype.itemsize, "SHARED": c["SHARED"]}


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """128 bytes of registers a thread; shared memory too for rows of over 64 KiB, which else would want clusters of more
    than four blocks; the fewest threads a block that make no large cluster."""

    def rank(c: Config) -> tuple[int, ...]:
        blocks = bucket(-(-n // (c["THREADS"] * c["EACH"])))
        wanted = int(n * dtype.itemsize > 2**16)
        return (c["SHARED"] != wanted, -c["EACH"], blocks > CLUSTERS[c["THREADS"]], c["THREADS"])

    return min(candidates(sm, dtype, n), key=rank)


@functools.cache
def longest(sm: int, dtype: torch.dtype) -> int:
    """Columns of the longest rows that a cluster holds."""
    n = LONGEST
    while not any(True for _ in candidates(sm, dtype, n)):
        n //= 2
    return n


configuration = Configurations(__file__, "cluster_backward", heuristic, candidates)


def why_not(y: Tensor, dy: Tensor) -> str:
    """Why these rows are not taken (an empty string when they are); columns come last."""
    if y.dtype != dy.dtype:
        return f"a gradient of dtype {dy.dtype} for a result of {y.dtype}"
    for t in (y, dy):
        if reason := row_cluster.why_not(t):
            return reason
    n, most = y.shape[-1], longest(target_sm(y.device), y.dtype)
    return f"{n} columns; a cluster of {MAX_CLUSTER} blocks holds {most} of y and dy" if n > most else ""


def too(along: Tensor) -> str:
    """What a choice says besides where rows like these (columns last) are taken by this kernel in the backward."""
    if torch.compiler.is_compiling() or along.shape[-1] < FROM or target_sm(along.device) < 90:
        return ""  # while something traces, nobody reads it, and a look at the shape would be a guard
    return "" if why_not(along, along) else "; backward: by a cluster of blocks, which reads y and dy once"


def plan(y: Tensor, dy: Tensor, dim: int, logs: bool) -> CudaPlan:
    """The gradient of softmax (of log-softmax with ``logs``) over ``dim`` into ``torch.empty_like(y)``; raises Declined as
    :func:`why_not` says."""
    like = torch.empty_like(y, device="meta")
    tensors = [t.movedim(dim, -1) for t in (y, dy, like)]
    if reason := why_not(*tensors[:2]) or row_cluster.why_not(tensors[2]):
        raise Declined(reason)
    config = configuration(y.device, y.dtype, bucket(tensors[0].shape[-1]))
    rows = RowCluster.of(tensors[0], config)
    shared = rows.elements * y.element_size() * config["SHARED"]
    flags = ", ".join(str(bool(f)).lower() for f in (config["SHARED"], logs))
    kernel = f"softmax_backward_cluster<{CTYPES[y.dtype]}, {rows.template}, {flags}>"
    strides = (ctypes.c_longlong((rows_of(t) or (0, 0, 0, 0))[2]) for t in tensors)
    return CudaPlan(SOURCE, kernel, rows.grid, rows.threads, (rows.scalars[0], *strides), rows.cluster, shared)


def plans(logs: bool) -> Plans:
    """Plans of the cluster kernel alone; they raise Declined."""
    return Plans(lambda y, dy, dim: plan(y, dy, dim, logs))


def plans_or(triton: Plans, logs: bool, least: int = 0) -> Plans:
    """The cluster kernel for rows of at least so many columns, where it takes them; else the plans of Triton kernels."""

    def build(y: Tensor, dy: Tensor, dim: int) -> object:
        if y.shape[dim] >= least and target_sm(y.device) >= 90:
            with contextlib.suppress(Declined):
                return plan(y, dy, dim, logs)
        return triton.of((y, dy), dim)

    return Plans(build)
