"""A norm with a row spread over a cluster of blocks (sm_90 and later): the plan of ``cluster.cu``, or of ``staying.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import row_cluster
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans, target_sm
from weft.operators.normalization import staying
from weft.operators.normalization.kind import Given, Kind
from weft.operators.residency import shared_limit
from weft.operators.row_cluster import RowCluster

SOURCE = Path(__file__).parent / "cluster.cu"
SHORTEST = 8192  # below, all multiprocessors copy the same few lines of the weight out of L2 at once, and wait for it


def heuristic(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Config:
    """Of LayerNorm two rows a cluster, each thread with half as much of each."""
    config = row_cluster.heuristic(sm, dtype, n)
    halves = centered and n <= config["THREADS"] * config["EACH"] // 2 * row_cluster.MAX_CLUSTER
    return {**config, "EACH": config["EACH"] // 2, "ROWS": 2} if halves else {**config, "ROWS": 1}


def candidates(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Iterable[Config]:
    for c in row_cluster.candidates(sm, dtype, n):
        yield {**c, "ROWS": 1}
        if centered:
            yield {**c, "ROWS": 2}
            if n <= c["THREADS"] * c["EACH"] // 4 * row_cluster.MAX_CLUSTER:
                yield {**c, "EACH": c["EACH"] // 4, "ROWS": 2}


configuration = Configurations(__file__, "cluster", heuristic, candidates)


def why_not(given: Given, kind: Kind) -> str:
    """Why the cluster kernel does not take these (an empty string when it does)."""
    if reason := row_cluster.why_not(given.x) or (row_cluster.why_not(given.residual) if kind.added else ""):
        return reason
    if given.x.shape[-1] < SHORTEST:
        return f"{given.x.shape[-1]} columns; below {SHORTEST} all blocks read the same few lines of the weight at once"
    if (kind.weighted and not pointer_aligned(given.weight)) or (kind.biased and not pointer_aligned(given.bias)):
        return "a weight or bias that does not begin on 16 bytes"
    shared = _row_bytes(given, kind)
    if shared > shared_limit(target_sm(given.x.device)):
        return f"{given.x.shape[-1]} columns: their weight and bias take {shared} bytes of a block's shared memory"
    return ""


def _config(x: Tensor, kind: Kind) -> Config:
    return configuration(x.device, x.dtype, bucket(x.shape[-1]), kind.centered)


def _row_bytes(given: Given, kind: Kind) -> int:
    """Of a block's slice of weight and bias."""
    c = _config(given.x, kind)
    return c["THREADS"] * c["EACH"] * given.weight.element_size() * (kind.weighted + kind.biased)


def plan(*call: object) -> CudaPlan:
    """As :func:`plans.forward_plan`, which takes the same; raises Declined as :func:`why_not` says."""
    given, eps, kind, kept = Given.of_call(call)
    if reason := why_not(given, kind):
        raise Declined(reason)
    if (stays := staying.plan(given, eps, kind, kept)) is not None:
        return stays
    x = given.x
    config = _config(x, kind)
    rows = RowCluster.of(x, config)
    n, x_row, y_row = rows.scalars
    m = rows.grid[0] // rows.cluster
    grid = (-(-m // config["ROWS"]) * rows.cluster, 1)
    r_row = ctypes.c_longlong((rows_of(given.residual) or (0, 0, 0, 0))[2])
    flags = ", ".join(str(f).lower() for f in (kind.centered, kind.weighted, kind.biased, kind.added, kept))
    kernel = (
        f"norm_cluster<{CTYPES[x.dtype]}, {CTYPES[given.weight.dtype]}, {rows.template}, {config['ROWS']}, {flags}>"
    )
    scalars = (ctypes.c_longlong(m), n, x_row, r_row, y_row, y_row, ctypes.c_float(eps))
    return CudaPlan(SOURCE, kernel, grid, rows.threads, scalars, rows.cluster, _row_bytes(given, kind))


plans = Plans(plan)
