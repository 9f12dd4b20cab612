"""Alibaba's GPU cluster 2023 (openb, Weng et al., USENIX ATC 2023): pods with shares of GPUs in thousandths, cores, MiB.

A pod runs from when it was scheduled to its deletion; one that never was is dropped. Pods without a GPU
are kept: they take the cores that others need.
"""

from pathlib import Path

import numpy as np

from weft.cluster.files.columns import read
from weft.cluster.model import WHOLE, Jobs
from weft.cluster.trace import Format, accepted, jobs_of, names

REQUESTS = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
TIMES = ("creation_time", "deletion_time", "scheduled_time")


def load(path: Path) -> Jobs:
    return _load(path, TIMES)


def requests(path: Path) -> Jobs:
    """All pods of a list, also of the lists that have no times, each as if it came at once and ran for a second: for runs that
    are about requests alone (``weft.cluster.inflation``)."""
    return _load(path, ())


def _load(path: Path, times: tuple[str, ...]) -> Jobs:
    table = read(path, (*REQUESTS, *times), ("name", "gpu_spec", "qos"), optional=("gpu_spec", "qos"))
    rows = len(table.lines)
    types, type_sets = accepted(table.words.get("gpu_spec", [""] * rows))
    gpus, milli = table.numbers["num_gpu"], table.numbers["gpu_milli"]
    submit, duration = np.zeros(rows), np.ones(rows)
    if times:
        submit = table.numbers["creation_time"]
        duration = table.numbers["deletion_time"] - table.numbers["scheduled_time"]
    tenant, tenants = names(table.words.get("qos", [""] * rows))
    return jobs_of(
        table,
        submit,
        duration,
        gpus,
        cpu_only=True,
        id=table.words["name"],
        milli=np.where((gpus > 0) & (milli > 0), milli, WHOLE),
        cpu=table.numbers["cpu_milli"],
        memory=table.numbers["memory_mib"],
        types=types,
        type_sets=type_sets,
        tenant=tenant,
        tenants=tenants,
    )


FORMAT = Format("openb", load, "Alibaba's GPU cluster 2023: pods with shares of GPUs, cores and memory")
