"""The plan of ``cluster.cu``: RMSNorm with a row spread over a cluster of blocks (sm_90 and later)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans
from weft.operators.normalization.kernels import views

SOURCE = Path(__file__).parent / "cluster.cu"
MAX_CLUSTER = 16


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """32 elements a thread; blocks of 512 threads, so that two or more share a multiprocessor and overlap."""
    return {"THREADS": 512 if n <= 512 * 32 * 8 else 1024, "EACH": 32}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    return [
        c
        for c in grid_of({"THREADS": (128, 256, 512, 1024), "EACH": (16, 32)})
        if n <= c["THREADS"] * c["EACH"] * 8 and n * 2 > c["THREADS"] * c["EACH"]
    ]


configuration = Configurations(__file__, "cluster", heuristic, candidates)


def plan(x: Tensor, weight: Tensor, eps: float, weighted: bool) -> CudaPlan:
    """Of ``(x, weight, y)`` with y = ``torch.empty_like(x)``.

    Raises:
        Declined: columns that are not adjacent in memory, or rows that a cluster of 16 blocks cannot hold.
    """
    (m, n, x_row, x_col), (_, _, y_row, y_col) = views(x, torch.empty_like(x, device="meta"))
    if (x_col != 1 or y_col != 1) and n > 1:
        raise Declined(f"columns {x_col} elements apart; the cluster kernel reads adjacent ones")
    config = configuration(x.device, x.dtype, bucket(n))
    per_block = config["THREADS"] * config["EACH"]
    cluster = bucket(-(-n // per_block))
    if cluster > MAX_CLUSTER:
        raise Declined(f"{n} columns; a cluster of {MAX_CLUSTER} blocks holds {per_block * MAX_CLUSTER}")
    count = 16 // x.element_size()
    if not pointer_aligned(x, weight) or n % count or x_row % count or y_row % count:
        count = 1
    types = f"{CTYPES[x.dtype]}, {CTYPES[weight.dtype]}, {config['THREADS']}, {config['EACH']}, {count}"
    return CudaPlan(
        SOURCE,
        f"rms_norm_cluster<{types}, {str(weighted).lower()}>",
        (m * cluster, 1),
        config["THREADS"],
        (ctypes.c_longlong(n), ctypes.c_longlong(x_row), ctypes.c_longlong(y_row), ctypes.c_float(eps)),
        cluster,
    )


plans = Plans(plan)
