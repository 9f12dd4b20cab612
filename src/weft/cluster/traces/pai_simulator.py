"""Alibaba PAI's simulator (Weng et al. 2022): ``pai_job_no_estimate_100K.csv``, ``pai_job_duration_estimate_100K.csv``."""

from pathlib import Path

import numpy as np

from weft.cluster.files import shares
from weft.cluster.files.columns import read
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, accepted, jobs_of, names, or_zero

NUMBERS = ("num_inst", "submit_time", "num_cpu", "num_gpu", "duration")


def load(path: Path) -> Jobs:
    """A job has ``num_inst`` equal pods (one where it is empty), each of ``num_gpu`` GPUs, 0.25 being a quarter of one, and of
    ``num_cpu`` cores. Seconds; a user is a tenant. A job accepts its ``gpu_type``. Those of type ``CPU`` accept any node, and
    are kept: they take the cores that others need. The durations that the file estimates (``group_gpu_dur`` …) are ignored.
    """
    table = read(path, NUMBERS, ("job_id", "user", "gpu_type"), optional=("num_inst", "gpu_type"))
    rows = len(table.lines)
    instances = table.whole("num_inst", least=1) if "num_inst" in table.numbers else np.ones(rows)
    instances = np.where(np.isnan(instances), 1, instances)
    gpus, milli, neither = shares.of_instances(or_zero(table.numbers["num_gpu"]), instances)
    cores = or_zero(np.rint(table.numbers["num_cpu"] * 1000) * instances)
    types, type_sets = accepted("" if kind == "CPU" else kind for kind in table.words.get("gpu_type", [""] * rows))
    tenant, tenants = names(table.words["user"])
    return jobs_of(
        table, table.numbers["submit_time"], table.numbers["duration"], gpus, {shares.NEITHER: neither}, cores > 0,
        id=table.words["job_id"], pods=instances, milli=milli, cpu=cores, types=types, type_sets=type_sets, tenant=tenant,
        tenants=tenants,
    )  # fmt: skip


FORMAT = Format("pai-simulator", load, "jobs of Alibaba PAI's simulator: num_inst pods of num_gpu GPUs, seconds")
