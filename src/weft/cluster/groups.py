"""Who fared how: jobs by size, by tenant and by type of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster import pieces
from weft.cluster.metrics import distribution, gpu_seconds
from weft.cluster.model import WHOLE

if TYPE_CHECKING:
    from weft.cluster.result import Result

CLASSES = {"1 GPU": (0, 1), "2–8 GPUs": (2, 8), "more than 8": (9, 2**62)}
MOST_TENANTS = 20  # those that used the most GPU seconds

Times = Mapping[str, NDArray[np.float64]]  # of metrics.times


def members(gpus: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """Which jobs belong to each size class; classes without a job are left out. Jobs without a GPU are with the smallest."""
    found = {name: (gpus >= low) & (gpus <= high) for name, (low, high) in CLASSES.items()}
    return {name: mask for name, mask in found.items() if mask.any()}


def by_size(result: Result, times: Times) -> dict[str, dict[str, Any]]:
    """Of each size class the jobs that ran, and their times."""
    ran = result.ran
    return {name: _group(times, np.flatnonzero(mask & ran)) for name, mask in members(result.jobs.gpus).items()}


def by_tenant(result: Result, times: Times) -> dict[str, dict[str, Any]]:
    """The same of the tenants that used most, most first, and their ``gpu_s``; nothing of a trace that names none."""
    jobs = result.jobs
    if len(jobs.tenants) < 2 and not any(jobs.tenants):
        return {}
    rows = np.flatnonzero(result.ran)
    used = np.bincount(jobs.tenant, gpu_seconds(result), minlength=len(jobs.tenants))
    rows = rows[np.argsort(jobs.tenant[rows], kind="stable")]
    edge = np.searchsorted(jobs.tenant[rows], np.arange(len(jobs.tenants) + 1))
    most = [t for t in np.argsort(-used, kind="stable").tolist() if edge[t] < edge[t + 1]][:MOST_TENANTS]
    return {
        jobs.tenants[t]: {"gpu_s": float(used[t]), **_group(times, np.sort(rows[edge[t] : edge[t + 1]]))} for t in most
    }


def by_type(result: Result, times: Times) -> dict[str, dict[str, Any]]:
    """Of each type of GPU how many there are, the jobs that held some to their end and their times, ``gpu_s`` for which they
    were held, and the share of its GPUs × makespan that this is; nothing of a cluster with one type. A job on several types
    is with each of them."""
    cluster, jobs = result.cluster, result.jobs
    if len(cluster.types) < 2:
        return {}
    held = pieces.of(result)
    kind = cluster.gpu_type[held.node]
    held_s = held.gpus * jobs.milli[held.job] / WHOLE * (held.end - held.start)
    used = np.bincount(kind, held_s, minlength=len(cluster.types))
    there = np.bincount(cluster.gpu_type, cluster.gpus, minlength=len(cluster.types))
    span = held.end.max(initial=-np.inf) - jobs.submit.min(initial=np.inf)
    found = {}
    for t, name in enumerate(cluster.types):
        rows = np.flatnonzero(np.bincount(held.job[kind == t], minlength=len(jobs)) > 0)
        found[name] = {
            "gpus": int(there[t]),
            "gpu_s": float(used[t]),
            "allocation": float(used[t] / (there[t] * span)) if there[t] and span > 0 else None,
            **_group(times, rows[result.ran[rows]]),
        }
    return found


def _group(times: Times, rows: NDArray[np.int64]) -> dict[str, Any]:
    return {"jobs": len(rows), **{name: distribution(values[rows]) for name, values in times.items()}}
