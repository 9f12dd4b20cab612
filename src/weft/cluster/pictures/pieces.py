"""What each node gave to each job: a row for every piece of every job that ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.placement import find as find_placement
from weft.cluster.simulate import Result

TAIL = 0.15  # of the time until the last start


@dataclass(frozen=True)
class Pieces:
    """Columns of length P. Pieces without a GPU or of no duration hold nothing and are left out."""

    job: NDArray[np.int64]
    node: NDArray[np.int64]
    gpus: NDArray[np.int64]
    start: NDArray[np.float64]  # seconds
    end: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.job)

    def take(self, rows: NDArray[Any]) -> Pieces:
        """Those rows: indices or a mask."""
        return Pieces(*(getattr(self, name)[rows] for name in ("job", "node", "gpus", "start", "end")))


def of(result: Result) -> Pieces:
    """The pieces of a result, by job. They are cut as the simulator cuts them (:mod:`weft.cluster.engine.kinds`)."""
    jobs, largest = result.jobs, int(result.cluster.gpus.max(initial=0))
    count = np.diff(result.slot)
    job = np.repeat(np.arange(len(jobs)), count)
    place = np.arange(len(job)) - result.slot[job]  # 0 for a job's first piece
    asked, pods = jobs.gpus[job], jobs.pods[job]
    whole = np.minimum(asked - place * largest, largest) if largest else asked
    gpus = np.where(pods > 0, asked // np.maximum(pods, 1), whole)
    node = result.where[: len(job)].astype(np.int64)
    start, end = result.start[job], result.end[job]
    held = (gpus > 0) & (node >= 0) & (end > start)  # false for NaN
    return Pieces(job[held], node[held], gpus[held], start[held], end[held])


def span(result: Result) -> tuple[float, float]:
    """The seconds that pictures show: from the first arrival to the last completion. Never empty.

    Durations have long tails, and nothing is decided after the last start: when completions go on for long after it,
    pictures end a while after it. Of an interrupted result they end at it, since what came later is not known.
    """
    jobs, ran = result.jobs, ~np.isnan(result.start)
    begin = float(jobs.submit.min()) if len(jobs) else 0.0
    if not ran.any():
        return begin, begin + 1.0
    started, end = float(result.start[ran].max()), float(result.end[ran].max())
    if started > begin:
        end = started if not result.complete else min(end, started + TAIL * (started - begin))
    return begin, end if end > begin else begin + 1.0


def cut_after(result: Result) -> int:
    """How many jobs complete later than pictures show."""
    return int((result.end > span(result)[1]).sum())


def without_nodes(result: Result) -> bool:
    """Whether the placement counted GPUs wherever they were: there is then no fragmentation, and a place means little."""
    return find_placement(result.placement).counted
