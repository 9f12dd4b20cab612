"""``weft simulate check``: what was read of a trace, what was dropped, and what is assumed where the trace says nothing."""

from typing import Any

import numpy as np

from weft.cluster.model import LATEST, WHOLE, Cluster, Jobs
from weft.words import count

QUANTILES = {"least": 0.0, "p50": 0.5, "p95": 0.95, "most": 1.0}
NO_ESTIMATES = "no estimates: backfilling, sjf, srsf and srtf know the true durations"
LISTED = 5  # tenants and types, by name


def assumptions(jobs: Jobs) -> list[str]:
    """What a simulation takes for granted where the trace says nothing, a sentence each."""
    found = []
    if np.array_equal(jobs.estimate, jobs.duration):
        found.append(NO_ESTIMATES)
    if unlimited := int((jobs.estimate >= LATEST).sum()):
        found.append(
            f"{count(unlimited, 'job')} without a limit of time: such a job never backfills, and may run for ever"
        )
    if len(jobs.tenants) < 2:
        found.append("no more than one tenant")
    if undivided := int(((jobs.pods == 0) & (jobs.gpus > 1)).sum()):
        found.append(f"no pods of {count(undivided, 'job')} with several GPUs: the placement divides them over nodes")
    if not jobs.types.any():
        found.append("no GPU types: every job runs on any, for the same time")
    for name, what in (("cpu", "cores"), ("memory", "main memory"), ("gpu_memory", "memory of a GPU")):
        if missing := int((getattr(jobs, name) == 0).sum()):
            found.append(f"no {what} of {count(missing, 'job')}: any node has enough")
    if len(np.unique(jobs.priority)) < 2:
        found.append("no priorities: the order priority is fifo")
    return found


def cluster_assumptions(cluster: Cluster) -> list[str]:
    """What a simulation takes for granted where the cluster file says nothing, a sentence each."""
    found = []
    for name, what in (("cpu", "cores"), ("memory", "main memory"), ("gpu_memory", "memory of a GPU")):
        unknown = getattr(cluster, name) < 0
        if missing := int((unknown & (cluster.gpus > 0) if name == "gpu_memory" else unknown).sum()):
            found.append(f"no {what} of {count(missing, 'node')}: enough for any job")
    return found


def check(jobs: Jobs, cluster: Cluster | None = None) -> dict[str, Any]:
    """The object of ``weft simulate check --json``.

    Args:
        cluster: counts the jobs that it can never run.
    """

    def spread(column: Any) -> dict[str, float]:
        return {name: float(np.quantile(column, q)) for name, q in QUANTILES.items()}

    shared = jobs.milli < WHOLE
    by_tenant = np.bincount(jobs.tenant, minlength=len(jobs.tenants))
    types = [" or ".join(jobs.type_sets[t]) or "any" for t in np.unique(jobs.types)]
    found: dict[str, Any] = {
        "jobs": len(jobs),
        "generated": jobs.generated,
        "submitted_over_s": float(np.ptp(jobs.submit)),
        "gpu_hours": float((jobs.duration * jobs.gpus * jobs.milli / WHOLE).sum() / 3600),
        "duration_s": spread(jobs.duration),
        "gpus": spread(jobs.gpus),
        "jobs_with_shares": int(shared.sum()),
        "jobs_without_gpu": int((jobs.gpus == 0).sum()),
        "jobs_with_pods": int((jobs.pods > 0).sum()),
        "types": types,
        "tenants": {jobs.tenants[t]: int(by_tenant[t]) for t in np.argsort(-by_tenant, kind="stable") if by_tenant[t]},
        "dropped": jobs.dropped,
        "warnings": list(jobs.warnings),
        "assumed": assumptions(jobs),
    }
    if cluster is not None:
        from weft.cluster.simulation import simulate

        by_type = np.bincount(cluster.gpu_type, cluster.gpus, len(cluster.types))
        found["cluster"] = {
            "nodes": len(cluster),
            "gpus": {name: int(n) for name, n in zip(cluster.types, by_type, strict=True) if n},
            "dropped": cluster.dropped,
            "warnings": list(cluster.warnings),
            "assumed": cluster_assumptions(cluster),
        }
        never = simulate(jobs, cluster, "fifo-skip").unschedulable
        found["never_run"] = [{"job": jobs.id[j], "reason": why} for j, why in never.items()]
    return found
