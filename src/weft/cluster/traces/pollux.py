"""Pollux (Qiao et al. 2021): workloads ``name, time, application, num_replicas, batch_size`` and folders of measurements."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from weft.cluster.files.columns import read
from weft.cluster.files.text import TraceError, beside
from weft.cluster.model import Jobs
from weft.cluster.trace import Format, jobs_of, names


def load(path: Path, measurements: str | Path | None = None, gpu: str = "") -> Jobs:
    """A workload has no durations. One is the iterations to the end of training, times the seconds of an iteration.

    Iterations: the last row of ``validation-BATCH.csv`` of the application. Seconds of an iteration: ``placements.csv`` on the
    fewest nodes that were measured with so many GPUs, else ``scalability.csv``, linear between the nearest batches of a GPU; a
    larger batch than was measured is made of several passes, of which the last alone synchronises. The job keeps its GPUs and
    batch for as long as it runs, as the workloads' tuned requests mean it; that Pollux and Sia change both is not simulated.
    An application is a tenant. Left out and counted: jobs whose batch or number of GPUs was not measured.

    Args:
        measurements: the folder of applications; by default ``traces`` in the workload's folder or up to three above.
        gpu: of Sia's GPU types, ``aws``, ``azure``, ``dgx``, ``rtx`` …: reads ``placements-GPU.csv``; by default without one.
    """
    table = read(path, ("time", "num_replicas", "batch_size"), ("name", "application"))
    place = Path(measurements) if measurements else beside(path, "traces")
    applications, gpus, batch = table.words["application"], table.whole("num_replicas", 1), table.whole("batch_size", 1)
    requests = list(zip(applications, gpus, batch, strict=True))
    duration = {(a, n, b): _duration(place / a, f"-{gpu}" if gpu else "", n, b) for a, n, b in set(requests)}
    column = np.array([duration[request] for request in requests])
    tenant, tenants = names(applications)
    return jobs_of(
        table, table.numbers["time"], column, gpus, {"not measured": np.isnan(column)},
        id=table.words["name"], tenant=tenant, tenants=tenants,
    )  # fmt: skip


def _duration(application: Path, suffix: str, gpus: float, batch: float) -> float:
    """Seconds of a training; NaN where it was not measured."""
    validation = _there(application / f"validation-{batch:g}.csv")
    measured = sorted(_measured(application, suffix, gpus))
    if not validation or not measured:
        return math.nan
    sizes, step, sync = zip(*measured, strict=True)
    local = math.ceil(batch / gpus)  # of each GPU
    passes = math.ceil(local / sizes[-1])
    size = math.ceil(local / passes)
    iterations = read(validation, ("iteration",)).numbers["iteration"]
    if size < sizes[0] or not len(iterations):
        return math.nan
    step_s, sync_s = float(np.interp(size, sizes, step)), float(np.interp(size, sizes, sync))
    return float(iterations[-1]) * (step_s + (passes - 1) * (step_s - sync_s))


def _measured(application: Path, suffix: str, gpus: float) -> list[tuple[float, ...]]:
    """Batch of a GPU, seconds of an iteration, seconds of it to synchronise: with so many GPUs on the fewest nodes."""
    numbers = ("local_bsz", "step_time", "sync_time")
    found: dict[tuple[int, int, str], list[tuple[float, ...]]] = defaultdict(list)
    if file := _there(application / f"placements{suffix}.csv"):
        table = read(file, numbers, ("placement",))
        for row, placement in enumerate(table.words["placement"]):
            if not placement.isdigit():
                raise table.wrong(row, "placement", "a digit for each node, its GPUs")
            nodes = [int(digit) for digit in placement]
            if sum(nodes) == gpus:  # of as many nodes the one whose nodes are filled first
                rank = (len(nodes), -sum(n * n for n in nodes), placement)
                found[rank].append(tuple(float(table.numbers[name][row]) for name in numbers))
    if not found and (file := _there(application / f"scalability{suffix}.csv")):
        table = read(file, (*numbers, "num_nodes", "num_replicas"))
        for row in np.flatnonzero(table.numbers["num_replicas"] == gpus).tolist():
            rank = int(table.numbers["num_nodes"][row]), 0, ""
            found[rank].append(tuple(float(table.numbers[name][row]) for name in numbers))
    return found[min(found)] if found else []


def _there(file: Path) -> Path | None:
    if not file.parent.is_dir():
        raise TraceError(f"{file.parent}: there are no measurements of this application")
    return next((f for f in (file, file.with_name(f"{file.name}.gz")) if f.exists()), None)


FORMAT = Format("pollux", load, "Pollux' and Sia's workloads and their measurements", options=("measurements", "gpu"))
