"""Chronus (Gao et al. 2021): Tiresias' columns, a deadline after submission (``expect_time_list``) and ``best_effort``."""

from pathlib import Path

from weft.cluster.files.columns import read
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, jobs_of, names


def load(path: Path, seconds_per_unit: float = 60.0) -> Jobs:
    """Jobs with a deadline have priority 1, best-effort jobs 0; the deadlines themselves are not used. Rows need not be sorted.

    Args:
        seconds_per_unit: the files count in units that nothing names. That 60 s is meant follows from their range: submissions
            span 20,151 of the 20,160 minutes of two weeks, and the longest job lasts 4,317 of the 4,320 of three days.
    """
    numbers = ("num_gpu", "submit_time", "duration", "best_effort")
    table = read(path, numbers, ("job_id", "user"))
    tenant, tenants = names(table.words["user"])
    return jobs_of(
        table,
        table.numbers["submit_time"] * seconds_per_unit,
        table.numbers["duration"] * seconds_per_unit,
        table.numbers["num_gpu"],
        id=table.words["job_id"],
        priority=(table.whole("best_effort") == 0).astype(float),
        tenant=tenant,
        tenants=tenants,
    )


FORMAT = Format("chronus", load, "Chronus' columns, minutes; best-effort jobs below the rest", ("seconds_per_unit",))
