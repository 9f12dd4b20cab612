"""Alibaba's jobs on spot GPUs (Duan et al., ASPLOS 2026): ``job_info_df.csv``, a job a row."""

from pathlib import Path

import numpy as np

from weft.cluster.files import shares
from weft.cluster.files.columns import read
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, accepted, jobs_of, names, or_zero

NUMBERS = ("cpu_request", "gpu_request", "worker_num", "submit_time", "duration")
PRIORITY = {"HP": 1.0, "Spot": 0.0}


def load(path: Path) -> Jobs:
    """A job has ``worker_num`` equal pods, each of ``gpu_request`` GPUs (below 1: a share of one) and ``cpu_request`` cores;
    jobs of one GPU have up to hundreds of workers. Seconds since the first submission. An organization is a tenant;
    high-priority jobs (``HP``) have priority 1, ``Spot`` 0. A job accepts its ``gpu_model``. Memory is not said.
    """
    table = read(path, NUMBERS, ("job_name", "organization", "gpu_model", "job_type"))
    workers = table.whole("worker_num", least=1)
    gpus, milli, neither = shares.of_instances(table.numbers["gpu_request"], workers)
    for row, kind in enumerate(table.words["job_type"]):
        if kind not in PRIORITY:
            raise table.wrong(row, "job_type", " or ".join(PRIORITY))
    cores = or_zero(np.rint(table.numbers["cpu_request"] * 1000) * workers)
    types, type_sets = accepted(table.words["gpu_model"])
    tenant, tenants = names(table.words["organization"])
    return jobs_of(
        table, table.numbers["submit_time"], table.numbers["duration"], gpus,
        {"no number of workers": np.isnan(workers), shares.NEITHER: neither},
        id=table.words["job_name"], pods=workers, milli=milli, cpu=cores, types=types,
        type_sets=type_sets, tenant=tenant, tenants=tenants,
        priority=[PRIORITY[kind] for kind in table.words["job_type"]],
    )  # fmt: skip


FORMAT = Format("spot", load, "Alibaba's job_info_df.csv of spot GPUs: worker_num pods of gpu_request GPUs, seconds")
