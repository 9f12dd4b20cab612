"""Who fared how: jobs by size and by tenant, and how evenly tenants were slowed down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.metrics import distribution, gpu_seconds

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


def fairness(result: Result, times: Times) -> dict[str, Any]:
    """Jain's index (Jain, Chiu, Hawe 1984) over the mean slowdowns of the ``tenants`` of whom a job ran: 1 where all are
    alike, 1/n where one of n bears everything; None of fewer than two tenants."""
    ran = result.ran
    tenant = result.jobs.tenant[ran]
    count = np.bincount(tenant)
    total = np.bincount(tenant, times["slowdown"][ran])
    mean = total[count > 0] / count[count > 0]
    index = min(float(mean.sum() ** 2 / (len(mean) * (mean**2).sum())), 1.0) if len(mean) > 1 else None
    return {"jain": index, "tenants": len(mean)}


def _group(times: Times, rows: NDArray[np.int64]) -> dict[str, Any]:
    return {"jobs": len(rows), **{name: distribution(values[rows]) for name, values in times.items()}}
