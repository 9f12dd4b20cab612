"""How evenly jobs and tenants fared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.metrics import LEAST_S, distribution

if TYPE_CHECKING:
    from weft.cluster.result import Result


def fairness(result: Result, slowdown: NDArray[np.float64]) -> dict[str, Any]:
    """``jain``: Jain's index (Jain, Chiu, Hawe 1984) over the mean slowdowns of the ``tenants`` of whom a job ran: 1 where all
    are alike, 1/n where one of n bears everything; None of fewer than two tenants. ``finish_time``: mean, p50, p95, p99 and
    ``max`` of :func:`finish_time_ratio`, and ``above_1``, the share of jobs that sharing made later."""
    ran = result.ran
    tenant = result.jobs.tenant[ran]
    count = np.bincount(tenant)
    total = np.bincount(tenant, slowdown[ran])
    mean = total[count > 0] / count[count > 0]
    index = min(float(mean.sum() ** 2 / (len(mean) * (mean**2).sum())), 1.0) if len(mean) > 1 else None
    ratio = finish_time_ratio(result)[ran]
    late = {
        **distribution(ratio),
        "max": float(ratio.max()) if len(ratio) else None,
        "above_1": float((ratio > 1 + 1e-9).mean()) if len(ratio) else None,
    }
    return {"jain": index, "tenants": len(mean), "finish_time": late}


def finish_time_ratio(result: Result) -> NDArray[np.float64]:
    """Completion time over what it had been with an equal part of the cluster's time, [J] (finish-time fairness; Mahajan et
    al., NSDI 2020): at most 1 for a job that fared no worse; NaN for one that did not run to its end.

    With an equal part a job takes its duration times the contention while it was there: the GPUs that all jobs there asked,
    waiting or running, over those of the cluster, on average, and at least 1. Durations below 10 s count as 10 s.
    """
    jobs, capacity = result.jobs, max(result.cluster.total_gpus, 1)
    there = np.ones(len(jobs), bool)
    there[list(result.unschedulable)] = False  # they are nobody's rivals
    time = np.concatenate((jobs.submit[there], np.nan_to_num(result.end[there], nan=np.inf)))
    asks = np.concatenate((result.gpus[there], -result.gpus[there]))
    order = np.argsort(time, kind="stable")
    time, asked = time[order], np.cumsum(asks[order])
    time, asked = time[np.isfinite(time)], asked[np.isfinite(time)]
    passed = np.concatenate(([0.0], np.cumsum(asked[:-1] * np.diff(time))))  # GPU seconds asked until time[i]
    ratio = np.full(len(jobs), np.nan)
    ran = np.flatnonzero(result.ran & there)
    begin, end = jobs.submit[ran], result.end[ran]
    jct = end - begin
    during = passed[np.searchsorted(time, end)] - passed[np.searchsorted(time, begin)]
    contention = np.maximum(during / (np.maximum(jct, 1e-9) * capacity), 1.0)
    ratio[ran] = jct / (np.maximum(jobs.duration[ran], LEAST_S) * contention)
    return ratio
