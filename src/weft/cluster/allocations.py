"""Which node held which piece of a job from when to when: a row for every piece of every job that ran."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster import gangs
from weft.cluster.policy import find_placement
from weft.cluster.result import Result


@dataclass(frozen=True)
class Allocations:
    """Columns of length P. Allocations without a GPU or of no duration hold nothing and are left out.

    ``milli`` counts thousandths of all its GPUs together: 1000 for each whole one, fewer for shares. ``on`` has a bit
    for each of the node's GPUs that it is on; 0 where the placement does not choose them.
    """

    job: NDArray[np.int64]
    stretch: NDArray[np.int64]  # of the job, in result.stretches
    node: NDArray[np.int64]
    gpus: NDArray[np.int64]
    milli: NDArray[np.int64]
    on: NDArray[np.int64]
    start: NDArray[np.float64]  # seconds
    end: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.job)

    def take(self, rows: NDArray[Any]) -> "Allocations":
        """Those rows: indices or a mask."""
        return Allocations(*(getattr(self, column.name)[rows] for column in fields(self)))


def of(result: Result) -> Allocations:
    """The pieces of a result, by job. They are cut as the simulator cuts them (:mod:`weft.cluster.gangs`)."""
    jobs, held = result.jobs, result.stretches
    request, first = gangs.requests(jobs)
    stretch = np.repeat(np.arange(len(held)), np.diff(held.slot))
    job = held.job[stretch]
    position = np.arange(len(job)) - held.slot[stretch]  # 0 for a job's first piece
    requested, pods = jobs.gpus[job], jobs.pods[job]
    largest = np.array(gangs.node_gpus(jobs, first, result.cluster), np.int64)[request][job]
    whole = np.where(largest > 0, np.minimum(requested - position * largest, largest), requested)
    gpus = np.where(pods > 0, requested // np.maximum(pods, 1), whole)
    node = held.where[: len(job)].astype(np.int64)
    on = held.on[: len(job)].astype(np.int64) if len(held.on) else np.zeros(len(job), np.int64)
    every = Allocations(job, stretch, node, gpus, gpus * jobs.milli[job], on, held.begin[stretch], held.end[stretch])
    return every.take((gpus > 0) & (node >= 0) & (every.end > every.start))  # false for NaN


def without_nodes(result: Result) -> bool:
    """Whether the placement counted GPUs wherever they were: there is then no fragmentation, and a place means
    little."""
    return find_placement(result.placement).counted
