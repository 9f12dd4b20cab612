"""Acme (Hu et al. 2024): ``trace_seren.csv`` (dates in +08:00) and ``trace_kalos.csv`` (UTC) of the Shanghai AI Laboratory."""

from pathlib import Path

import numpy as np

from weft.cluster.files.columns import read
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, jobs_of, names, or_zero


def load(path: Path) -> Jobs:
    """Seconds count from the first submission; a user is a tenant.

    A job runs from ``start_time`` to ``end_time``: ``duration`` is that in Seren, but has the wait in it in Kalos. A job on
    several nodes comes in as many pods where its GPUs divide among them, else the placement splits it. ``cpu_num`` counts for
    the whole job, ``mem_per_pod_GB`` (Kalos) for each node and is taken for GiB.
    """
    table = read(
        path,
        ("node_num", "gpu_num", "cpu_num", "mem_per_pod_GB"),
        ("job_id", "user", "submit_time", "start_time", "end_time"),
        optional=("mem_per_pod_GB",),
    )
    submit, start, end = (table.times(name) for name in ("submit_time", "start_time", "end_time"))
    nodes, gpus, cpu = (table.whole(name) for name in ("node_num", "gpu_num", "cpu_num"))
    memory = table.numbers.get("mem_per_pod_GB", np.zeros(len(gpus))) * 1024 * nodes
    even = (nodes > 0) & (gpus % np.maximum(nodes, 1) == 0)
    tenant, tenants = names(table.words["user"])
    return jobs_of(
        table, submit, end - start, gpus,
        {"never started": np.isnan(start), "no end": np.isnan(end)},
        id=table.words["job_id"], pods=np.where(even, nodes, 0), cpu=or_zero(cpu * 1000),
        memory=or_zero(np.rint(memory)), tenant=tenant, tenants=tenants, dated=True,
    )  # fmt: skip


FORMAT = Format("acme", load, "Acme's trace_seren.csv and trace_kalos.csv: dates, seconds, GiB for each pod")
