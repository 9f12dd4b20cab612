"""What users and owners ask of a schedule: how long jobs took and waited, how full the cluster was, who fared how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from weft.cluster.result import Result

LEAST_S = 10.0  # a shorter job counts as so long in slowdowns, so that moments do not rule them


def distribution(values: NDArray[np.float64]) -> dict[str, float | None]:
    """``mean``, ``p50``, ``p95`` and ``p99``; None of nothing."""
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def slowdown(jct: NDArray[np.float64], duration: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bounded slowdown (Feitelson et al., JSSPP 1997): completion time over duration, of which neither a moment's job nor a
    job that did not wait counts for less than 1."""
    return np.maximum(jct / np.maximum(duration, LEAST_S), 1.0)


def times(result: Result) -> dict[str, NDArray[np.float64]]:
    """``jct`` and ``queueing`` (seconds) and ``slowdown`` (times) of every job, [J]; NaN for one that never started."""
    jct = result.end - result.jobs.submit
    return {"jct": jct, "queueing": result.queueing, "slowdown": slowdown(jct, result.jobs.duration)}


def gpu_seconds(result: Result) -> NDArray[np.float64]:
    """What every job used, [J]: shares of a GPU count as such, work that was lost does not; 0 for a job that did not run."""
    return np.where(result.ran, result.gpus * result.jobs.duration, 0.0)


def summary(result: Result) -> dict[str, Any]:
    """The object of ``weft simulate --json``: seconds throughout; jobs that never started count in no distribution."""
    from weft.cluster.allocation import allocation
    from weft.cluster.fairness import fairness
    from weft.cluster.groups import by_size, by_tenant, by_type
    from weft.cluster.locality import locality
    from weft.cluster.order import find as find_order
    from weft.cluster.placement import find as find_placement
    from weft.cluster.result import REASONS

    order, mode = find_order(result.order)
    jobs, ran = result.jobs, result.ran
    every = times(result)
    first = float(jobs.submit.min()) if len(jobs) else 0.0
    last = float(result.end[ran].max()) if ran.any() else None
    makespan = 0.0 if last is None else last - first
    gpus, used = result.cluster.total_gpus, float(gpu_seconds(result).sum())
    return {
        "order": result.order,
        "placement": result.placement,
        "ties": result.ties,
        "seed": result.seed,
        "validated": {
            "order": order.validated.get(mode, ""),
            "placement": find_placement(result.placement).validated,
        },
        "jobs": len(jobs),
        "completed": int(ran.sum()),
        "generated": jobs.generated,
        "dropped": jobs.dropped,
        "warnings": list(jobs.warnings),
        "nodes": len(result.cluster),
        "gpus": gpus,
        **{name: distribution(values[ran]) for name, values in every.items()},
        "makespan": makespan,
        "last_completion": last,
        "gpu_s": used,
        "utilisation": used / (gpus * makespan) if makespan and gpus else None,
        "allocation": allocation(result),
        "locality": locality(result),
        "preemptions": int(result.stops.sum()),
        "lost_gpu_s": float((result.lost * result.gpus).sum()),
        "restart_s": result.restart_s,
        "checkpoint_s": result.checkpoint_s,
        "weights": dict(result.weights),
        "quotas": {name: quota.as_json() for name, quota in result.quotas.items()},
        "wait_reasons": {name: float(column.sum()) for name, column in zip(REASONS, result.waited.T, strict=True)},
        "by_size": by_size(result, every),
        "by_tenant": by_tenant(result, every),
        "by_type": by_type(result, every),
        "fairness": fairness(result, every["slowdown"]),
        "unschedulable": [{"job": jobs.id[j], "reason": why} for j, why in result.unschedulable.items()],
        "complete": result.complete,
        "cpu_s": result.cpu_s,
        "peak_memory_mib": peak_memory_mib(),
    }


def peak_memory_mib() -> float | None:
    """The largest resident size that this process has had."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
