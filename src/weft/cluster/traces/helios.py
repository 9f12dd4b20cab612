"""Helios (Hu et al. 2021): ``job_id, vc, gpu_num, submit_time, duration`` in seconds, or raw ``cluster_log.csv`` with dates."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.cluster.model import Jobs
from weft.cluster.trace import Format, TraceError, jobs_of, names, read, seconds


def load(path: Path) -> Jobs:
    table = read(path, ("gpu_num", "duration"), ("job_id", "vc", "submit_time"))
    submit = np.empty(len(table.lines))
    for row, text in enumerate(table.words["submit_time"]):
        try:
            submit[row] = float(text) if text.replace(".", "", 1).isdigit() else seconds(text)
        except ValueError:
            raise TraceError(
                f"{path}:{table.lines[row]}: submit_time is '{text}'; expected seconds or a date"
            ) from None
    tenant, tenants = names(table.words["vc"])
    return jobs_of(
        table, submit, table.numbers["duration"], table.numbers["gpu_num"],
        id=table.words["job_id"], tenant=tenant, tenants=tenants,
    )  # fmt: skip


FORMAT = Format("helios", load, "Helios' five columns in seconds, or its raw cluster_log.csv")
