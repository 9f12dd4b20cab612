"""What each node gave to each job: a row for every piece of every job that ran."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster import gangs
from weft.cluster.placement import find as find_placement
from weft.cluster.result import Result

TAIL = 0.15  # of the time until the last start


@dataclass(frozen=True)
class Pieces:
    """Columns of length P. Pieces without a GPU or of no duration hold nothing and are left out.

    ``milli`` counts thousandths of all its GPUs together: 1000 for each whole one, fewer for shares. ``on`` has a bit for each
    of the node's GPUs that it is on; 0 where the placement does not choose them.
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

    def take(self, rows: NDArray[Any]) -> Pieces:
        """Those rows: indices or a mask."""
        return Pieces(*(getattr(self, column.name)[rows] for column in fields(self)))


def of(result: Result) -> Pieces:
    """The pieces of a result, by job. They are cut as the simulator cuts them (:mod:`weft.cluster.gangs`)."""
    jobs, held = result.jobs, result.stretches
    request, first = gangs.requests(jobs)
    stretch = np.repeat(np.arange(len(held)), np.diff(held.slot))
    job = held.job[stretch]
    place = np.arange(len(job)) - held.slot[stretch]  # 0 for a job's first piece
    asked, pods = jobs.gpus[job], jobs.pods[job]
    largest = np.array(gangs.node_gpus(jobs, first, result.cluster), np.int64)[request][job]
    whole = np.where(largest > 0, np.minimum(asked - place * largest, largest), asked)
    gpus = np.where(pods > 0, asked // np.maximum(pods, 1), whole)
    node = held.where[: len(job)].astype(np.int64)
    on = held.on[: len(job)].astype(np.int64) if len(held.on) else np.zeros(len(job), np.int64)
    every = Pieces(job, stretch, node, gpus, gpus * jobs.milli[job], on, held.begin[stretch], held.end[stretch])
    return every.take((gpus > 0) & (node >= 0) & (every.end > every.start))  # false for NaN


def span(result: Result) -> tuple[float, float]:
    """The seconds that pictures show: from the first arrival to the last completion. Never empty.

    Durations have long tails, and nothing is decided after the last start: when completions go on for long after it,
    pictures end a while after it. Of an interrupted result they end at it, since what came later is not known.
    """
    jobs, held = result.jobs, result.stretches
    ran = ~np.isnan(held.begin)
    begin = float(jobs.submit.min()) if len(jobs) else 0.0
    if not ran.any():
        return begin, begin + 1.0
    started, end = float(held.begin[ran].max()), float(held.end[ran].max())
    if started > begin:
        end = started if not result.complete else min(end, started + TAIL * (started - begin))
    return begin, end if end > begin else begin + 1.0


def cut_after(result: Result) -> int:
    """How many jobs complete later than pictures show."""
    return int((result.end > span(result)[1]).sum())


def without_nodes(result: Result) -> bool:
    """Whether the placement counted GPUs wherever they were: there is then no fragmentation, and a place means little."""
    return find_placement(result.placement).counted
