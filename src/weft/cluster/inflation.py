"""Filling a cluster until it is full: how FGD's authors compare placements (Weng et al., USENIX ATC 2023, section 6).

Pods arrive one a second in a random order and never leave. When the trace ends they are drawn from it again, until what
has been requested is a multiple of the cluster's GPUs. The result is how much of them was allocated by then.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import LATEST, WHOLE, Cluster, Jobs
from weft.cluster.result import Result
from weft.cluster.simulation import simulate


def arrivals(jobs: Jobs, rows: NDArray[np.int64]) -> Jobs:
    """Those rows of a trace, in that order, one a second, and none ever ends."""
    picked = {name: getattr(jobs, name)[rows] for name in jobs.columns()}
    picked |= {
        "submit": np.arange(len(rows), dtype=np.float64),
        "duration": np.full(len(rows), LATEST),
        "estimate": None,
    }
    return dataclasses.replace(jobs, **picked, id=[f"{jobs.id[int(r)]}@{i}" for i, r in enumerate(rows)])


def inflated(jobs: Jobs, cluster: Cluster, ratio: float = 1.3, seed: int = 0) -> Jobs:
    """The trace shuffled, then drawn from again until ``ratio`` times the cluster's GPUs have been requested.

    Raises:
        ValueError: the trace requests no GPU.
    """
    asked = jobs.gpus * jobs.milli
    if not asked.any():
        raise ValueError("no job requests a GPU, so they never fill a cluster; expected some that do")
    random = np.random.default_rng(seed)
    rows = random.permutation(len(jobs))
    enough = ratio * cluster.total_gpus * WHOLE
    while (total := asked[rows].sum()) < enough:
        more = int((enough - total) / asked.mean()) + 1
        rows = np.concatenate([rows, random.integers(0, len(jobs), more)])
    return arrivals(jobs, rows[: int(np.searchsorted(np.cumsum(asked[rows]), enough, side="right"))])


def reordered(cluster: Cluster, rows: NDArray[np.int64]) -> Cluster:
    """The nodes in another order: which of equally good ones is the lowest."""
    found = {f.name: getattr(cluster, f.name) for f in dataclasses.fields(cluster)}
    columns: dict[str, Any] = {name: v[rows] for name, v in found.items() if isinstance(v, np.ndarray)}
    return dataclasses.replace(cluster, names=tuple(cluster.names[int(n)] for n in rows), **columns)


def fill(jobs: Jobs, cluster: Cluster, placement: str, *, ratio: float = 1.3, seed: int = 0) -> Result:
    """One run of the experiment: arrivals and nodes in the order of the seed; typical pods are those of the trace."""
    coming = inflated(jobs, cluster, ratio, seed)
    nodes = reordered(cluster, np.random.default_rng((seed, 1)).permutation(len(cluster)))
    return simulate(coming, nodes, "fifo-skip", placement, seed=seed, until=float(len(coming)), history=jobs)


def allocated(result: Result, arrived: float = 1.0) -> float:
    """The share of the cluster's GPUs that was allocated when ``arrived`` times all of them had been requested."""
    asked, capacity = result.jobs.gpus * result.jobs.milli, result.cluster.total_gpus * WHOLE
    last = int(np.searchsorted(np.cumsum(asked), arrived * capacity))
    ran = ~np.isnan(result.start[: last + 1])
    return float(asked[: last + 1][ran].sum() / capacity)
