"""Tiresias (Gu et al. 2019): ``job_id, num_gpu, submit_time, iterations, model_name, duration, interval``, in seconds."""

from pathlib import Path

from weft.cluster.files.columns import read
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, jobs_of, names


def load(path: Path, unit: float = 1.0) -> Jobs:
    """``unit``: seconds of one of the file's."""
    table = read(
        path, ("num_gpu", "submit_time", "duration", "priority"), ("job_id", "user"), optional=("priority", "user")
    )
    tenant, tenants = names(table.words.get("user") or [""] * len(table.lines))
    columns = table.numbers
    more = {"priority": columns["priority"]} if "priority" in columns else {}
    return jobs_of(
        table,
        columns["submit_time"] * unit,
        columns["duration"] * unit,
        columns["num_gpu"],
        id=table.words["job_id"],
        tenant=tenant,
        tenants=tenants,
        **more,
    )


FORMAT = Format("tiresias", load, "Tiresias' columns, seconds (also Chronus', and Philly and Muri in Tiresias' form)")
