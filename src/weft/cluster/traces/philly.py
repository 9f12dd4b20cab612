"""Philly (Jeon et al. 2019) in its derived form: ``timestamp, duration, num_gpus, gpu_time, cluster``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.cluster.model import Jobs
from weft.cluster.trace import Format, TraceError, jobs_of, names, read, seconds


def load(path: Path) -> Jobs:
    """Seconds count from the first submission. Rows need not be sorted."""
    table = read(path, ("duration", "num_gpus"), ("timestamp", "cluster"))
    submit = np.empty(len(table.lines))
    for row, text in enumerate(table.words["timestamp"]):
        try:
            submit[row] = seconds(text)
        except ValueError:
            raise TraceError(f"{path}:{table.lines[row]}: timestamp is '{text}'; expected a date and time") from None
    tenant, tenants = names(table.words["cluster"])
    first = np.nanmin(submit) if len(submit) else 0.0
    return jobs_of(
        table, submit - first, table.numbers["duration"], table.numbers["num_gpus"], tenant=tenant, tenants=tenants
    )


FORMAT = Format("philly", load, "Philly's derived form: date, duration in seconds, GPUs, virtual cluster")
