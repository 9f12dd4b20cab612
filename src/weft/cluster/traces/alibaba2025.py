"""Alibaba's disaggregated DLRM inference (2025): one row an instance, requests, and three times of a window in seconds."""

from pathlib import Path

import numpy as np

from weft.cluster.files.columns import read
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, jobs_of, names, or_zero

NUMBERS = ("cpu_request", "gpu_request", "memory_request", "creation_time", "scheduled_time", "deletion_time")


def load(path: Path) -> Jobs:
    """An instance is a job of one pod that runs from ``scheduled_time`` to ``deletion_time``; an application is a tenant.

    A time outside the window of the trace is empty. How long such an instance ran is not known, so it is left out and counted:
    those that were there before the window, and those that were there after it. Instances without a GPU (role CN) are left
    out as well. ``max_instance_per_node``, RDMA and disks are ignored. Memory is taken for GiB.
    """
    table = read(path, NUMBERS, ("instance_sn", "app_name"))
    cpu, gpus, memory, created, scheduled, deleted = (table.numbers[name] for name in NUMBERS)
    tenant, tenants = names(table.words["app_name"])
    return jobs_of(
        table, created, deleted - scheduled, gpus,
        {
            "no GPU": gpus == 0,
            "there before the window": np.isnan(created) | np.isnan(scheduled),
            "there after the window": np.isnan(deleted),
        },
        id=table.words["instance_sn"], pods=np.ones(len(gpus)), cpu=or_zero(np.rint(cpu * 1000)),
        memory=or_zero(np.rint(memory * 1024)), tenant=tenant, tenants=tenants,
    )  # fmt: skip


FORMAT = Format("alibaba2025", load, "Alibaba's disaggregated DLRM instances, seconds, GiB")
