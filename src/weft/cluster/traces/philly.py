"""Philly (Jeon et al. 2019): raw ``cluster_job_log`` (JSON), or ``timestamp, duration, num_gpus, gpu_time, cluster``."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.files.columns import read, seconds
from weft.cluster.files.text import TraceError, json_of, text_of
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, earliest, jobs_of, names


def load(path: Path) -> Jobs:
    """Seconds count from the first submission; a virtual cluster is a tenant. Rows need not be sorted."""
    if text_of(path).read(100).lstrip().startswith(("[", "{")):
        return raw(path)
    table = read(path, ("duration", "num_gpus"), ("timestamp", "cluster"))
    tenant, tenants = names(table.words["cluster"])
    return jobs_of(
        table, table.times("timestamp"), table.numbers["duration"], table.numbers["num_gpus"],
        tenant=tenant, tenants=tenants, dated=True,
    )  # fmt: skip


def raw(path: Path) -> Jobs:
    """Jobs of ``cluster_job_log``.

    The duration is the sum of a job's attempts: the time between two attempts is waiting, which the simulator decides itself.
    Its GPUs are those of the attempt that had most. Left out and counted are jobs that no attempt ran, that still ran when the
    log was taken, that have an attempt without its times or one that ends before it starts (the clock's hour in November),
    and that had no GPU.
    """
    entries = json_of(path)
    if not isinstance(entries, list):
        raise TraceError(f"{path}: a JSON {type(entries).__name__}; expected a list of jobs")
    rows, dropped = [], Counter[str]()
    for number, entry in enumerate(entries, 1):
        try:
            submit, ran, gpus = seconds(entry["submitted_time"] or ""), *_attempts(entry["attempts"])
            rows.append((str(entry["jobid"]), str(entry["vc"]), submit, ran, gpus))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            known = entry.get("jobid", "no jobid") if isinstance(entry, dict) else "no object"
            raise TraceError(
                f"{path}: job {number} ({known}): {type(error).__name__}: {error}; expected submitted_time, jobid, vc and "
                "attempts of start_time, end_time and detail"
            ) from None
    kept = []
    for row in rows:
        why = "no submission" if np.isnan(row[2]) else row[3] if isinstance(row[3], str) else "" if row[4] else "no GPU"
        if why:
            dropped[why] += 1
        else:
            kept.append(row)
    tenant, tenants = names(row[1] for row in kept)
    at = np.array([row[2] for row in kept])
    return Jobs(
        at - earliest(at) if len(at) else at,
        np.array([row[3] for row in kept]),
        np.array([row[4] for row in kept], np.int64),
        id=[row[0] for row in kept],
        tenant=tenant,
        tenants=tenants,
        dropped=dict(dropped),
        epoch=earliest(at),
    )


def _attempts(attempts: list[dict[str, Any]]) -> tuple[float | str, int]:
    """Seconds that the attempts ran together, or why they do not say; and their GPUs."""
    times = [(seconds(a["start_time"] or ""), seconds(a["end_time"] or "")) for a in attempts]
    gpus = max((sum(len(server["gpus"]) for server in a["detail"]) for a in attempts), default=0)
    if not times:
        return "never ran", gpus
    if np.isnan(times[-1][1]) and not np.isnan(times[-1][0]):
        return "still running", gpus
    if np.isnan(times).any():
        return "an attempt without its times", gpus
    if any(end < start for start, end in times):
        return "an attempt that ends before it starts", gpus
    return sum(end - start for start, end in times), gpus


FORMAT = Format(
    "philly", load, "Philly's raw cluster_job_log (JSON), or its derived CSV: date, duration, GPUs, cluster"
)
