"""The plans of ``cluster.cu`` (sm_90 and later): cross entropy with its gradient, a row spread over a cluster of blocks; the
loss alone, whose rows are walked; the gradient alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import row_cluster
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import multiprocessors
from weft.operators.loss.kernels import Options
from weft.operators.row_cluster import RowCluster, candidates, heuristic

SOURCE = Path(__file__).parent / "cluster.cu"
TARGETS = {torch.int64: "i64", torch.int32: "int"}
# bytes of logits a multiprocessor from which shared memory holds some too: with less, all rows are there at once
FILLS = 2**18
LEAST = 8192  # bytes of a row that a block should walk
MOST_BLOCKS = 2**31 - 1  # of a grid


def shared_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """128 bytes of registers and as many of shared memory a thread; four blocks share a multiprocessor where a cluster of
    such blocks holds a row."""
    each = 256 // dtype.itemsize
    threads = 128 if n <= 128 * each else 256 if n <= 256 * each * row_cluster.MAX_CLUSTER else 512
    return {"THREADS": threads, "EACH": each}


def shared_candidates(sm: int, dtype: torch.dtype, n: int) -> Iterator[Config]:
    each = 256 // dtype.itemsize
    for c in grid_of({"THREADS": (128, 256, 512), "EACH": (each // 2, each)}):
        if n <= c["THREADS"] * c["EACH"] * row_cluster.MAX_CLUSTER and n * 2 > c["THREADS"] * c["EACH"]:
            yield c


def loss_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Small blocks, of which a multiprocessor holds eight: they wait at different times."""
    return {"THREADS": 128 if n * dtype.itemsize <= 2**17 else 256}


def loss_candidates(sm: int, dtype: torch.dtype, n: int) -> Iterator[Config]:
    return ({"THREADS": t} for t in (128, 256, 512))


def gradient_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    return {"THREADS": 128, "EACH": 128 // dtype.itemsize}


def gradient_candidates(sm: int, dtype: torch.dtype, n: int) -> Iterator[Config]:
    each = 128 // dtype.itemsize
    return ({"THREADS": t, "EACH": e} for t in (64, 128, 256, 512) for e in (each // 4, each // 2, each))


with_gradient_configuration = Configurations(__file__, "cluster_with_gradient", heuristic, candidates)
shared_configuration = Configurations(__file__, "cluster_shared", shared_heuristic, shared_candidates)
loss_configuration = Configurations(__file__, "cuda_loss", loss_heuristic, loss_candidates)
gradient_configuration = Configurations(__file__, "cuda_gradient", gradient_heuristic, gradient_candidates)


def why_not(x: Tensor, options: Options, has_weight: bool, dx: Tensor) -> str:
    """Why the kernels do not take the call (an empty string when they do)."""
    if options.label_smoothing > 0 and has_weight:
        return "label smoothing with class weights, which every column would have to read"
    return row_cluster.why_not(x) or row_cluster.why_not(dx)


def plan(
    x: Tensor, target: Tensor, weight: Tensor, dx: Tensor, options: Options, has_weight: bool, gradient: bool
) -> CudaPlan:
    """Of ``(x, target, weight, sums, loss, stats, dx)``; without a weight, sums or gradient any tensor stands in for it.

    Raises:
        Declined: as :func:`why_not` says.
    """
    if not gradient:
        return loss_plan(x, target, weight, dx, options, has_weight)
    if reason := why_not(x, options, has_weight, dx):
        raise Declined(reason)
    shared = x.numel() * x.element_size() >= FILLS * multiprocessors(x.device)
    config = (shared_configuration if shared else with_gradient_configuration)(x.device, x.dtype, bucket(x.shape[1]))
    rows = RowCluster.of(x, config)
    flags = (shared, *_flags(options, has_weight))
    kernel = f"cross_entropy_cluster<{_types(x, target, weight)}, {rows.template}, {_words(flags)}>"
    scalars = _scalars(x, dx, target, weight, options)
    kept = rows.elements * x.element_size() // 2 if shared else 0
    return CudaPlan(SOURCE, kernel, rows.grid, rows.threads, scalars, rows.cluster, kept)


def loss_plan(x: Tensor, target: Tensor, weight: Tensor, dx: Tensor, options: Options, has_weight: bool) -> CudaPlan:
    """The same without a gradient: ``dx`` is not looked at. A block walks a row, or where there are too few rows to fill the
    machine a cluster of blocks does.

    Raises:
        Declined: as :func:`why_not` says.
    """
    if reason := why_not(x, options, has_weight, x):
        raise Declined(reason)
    (m, v), count = x.shape, 16 // x.element_size()
    threads = loss_configuration(x.device, x.dtype, bucket(v))["THREADS"]
    wanted = -(-multiprocessors(x.device) * (1024 // threads) // m)  # blocks of a row that fill the machine
    blocks = min(bucket(wanted), bucket(max(v * x.element_size() // LEAST, 1)), row_cluster.MAX_CLUSTER)
    if m * blocks > MOST_BLOCKS:
        raise Declined(f"{m} rows; a grid has {MOST_BLOCKS} blocks")
    each = -(-v // (blocks * count)) * count
    kernel = f"cross_entropy_loss<{_types(x, target, weight)}, {threads}, {_words(_flags(options, has_weight))}>"
    scalars = (*_scalars(x, dx, target, weight, options), ctypes.c_longlong(each))
    return CudaPlan(SOURCE, kernel, (m * blocks, 1), threads, scalars, blocks)


def gradient_plan(
    x: Tensor, target: Tensor, weight: Tensor, dloss: Tensor, dx: Tensor, options: Options, has_weight: bool
) -> CudaPlan:
    """Of ``(x, target, weight, sums, stats, dloss, dx)``; dloss is [M], or [] for the mean and the sum. dx may be x.

    Raises:
        Declined: as :func:`why_not` says.
    """
    if reason := why_not(x, options, has_weight, dx):
        raise Declined(reason)
    m, v = x.shape
    config = gradient_configuration(x.device, x.dtype, bucket(v))
    threads, each = config["THREADS"], config["EACH"]
    parts = -(-v // (threads * each))
    if m * parts > MOST_BLOCKS:
        raise Declined(f"{m} rows of {parts} parts; a grid has {MOST_BLOCKS} blocks")
    types = f"{_types(x, target, weight)}, {CTYPES[dloss.dtype]}"
    kernel = f"cross_entropy_gradient<{types}, {threads}, {each}, {_words(_flags(options, has_weight))}>"
    strides = (target.stride(0), weight.stride(0), dloss.stride(0) if dloss.ndim else 0)
    integers = (v, _row(x), _row(dx), *strides, options.ignore_index)
    scalars = (*map(ctypes.c_longlong, integers), *_floats(options), ctypes.c_uint(parts))
    return CudaPlan(SOURCE, kernel, (m * parts, 1), threads, scalars)


def _types(x: Tensor, target: Tensor, weight: Tensor) -> str:
    return f"{CTYPES[x.dtype]}, {TARGETS[target.dtype]}, {CTYPES[weight.dtype]}"


def _flags(options: Options, has_weight: bool) -> tuple[bool, ...]:
    return has_weight, options.reduction == "mean", options.label_smoothing > 0, options.soft_cap > 0


def _words(flags: tuple[bool, ...]) -> str:
    return ", ".join(str(f).lower() for f in flags)


def _row(x: Tensor) -> int:
    """Elements from row to row."""
    return (rows_of(x) or (0, 0, 0, 0))[2]


def _floats(options: Options) -> tuple[Any, ...]:
    return tuple(map(ctypes.c_float, (options.label_smoothing, options.z_loss, options.soft_cap)))


def _scalars(x: Tensor, dx: Tensor, target: Tensor, weight: Tensor, options: Options) -> tuple[Any, ...]:
    integers = (x.shape[1], _row(x), _row(dx), target.stride(0), weight.stride(0), options.ignore_index)
    return (*map(ctypes.c_longlong, integers), *_floats(options))
