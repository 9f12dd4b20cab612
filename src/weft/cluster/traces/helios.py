"""Helios (Hu et al. 2021): ``job_id, vc, gpu_num, submit_time, duration`` in seconds, or raw ``cluster_log.csv`` with dates."""

from pathlib import Path

from weft.cluster.files.columns import read
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, jobs_of, names, or_zero


def load(path: Path) -> Jobs:
    """A virtual cluster is a tenant. ``cpu_num`` counts for the whole job; ``node_num`` is left to the placement."""
    table = read(path, ("gpu_num", "duration", "cpu_num"), ("job_id", "vc", "submit_time"), optional=("cpu_num",))
    tenant, tenants = names(table.words["vc"])
    more = {"cpu": or_zero(table.whole("cpu_num")) * 1000} if "cpu_num" in table.numbers else {}
    return jobs_of(
        table, table.times("submit_time"), table.numbers["duration"], table.numbers["gpu_num"],
        id=table.words["job_id"], tenant=tenant, tenants=tenants, **more,
    )  # fmt: skip


FORMAT = Format("helios", load, "Helios' five columns in seconds, or its raw cluster_log.csv")
