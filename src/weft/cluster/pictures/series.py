"""Numbers over time: GPUs allocated, jobs and GPUs waiting, GPUs free on nodes that are partly used.

Each is a step function, which changes at starts, completions and arrivals. Where it has more steps than a picture can show
it is cut into bins, each with its mean over time and its maximum; both are exact.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.cluster.allocations import Allocations
from weft.cluster.model import WHOLE
from weft.cluster.pictures.time_axis import span
from weft.cluster.result import Result

MOST_POINTS = 1200  # about the pixels of a wide chart

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """A step function: ``value[i]`` from ``time[i]`` until ``time[i + 1]``, 0 before the first; times rise."""

    time: Floats
    value: Floats

    @classmethod
    def of(cls, time: Floats, change: NDArray[np.int64]) -> "Steps":
        """From changes at times, in any order: thousandths, so that sums are exact. All of one time count as one."""
        order = np.argsort(time, kind="stable")
        time, value = time[order], np.cumsum(change[order]) / WHOLE
        last = np.append(time[1:] != time[:-1], True)[: len(time)]
        return cls(time[last], value[last])

    def at(self, time: Floats) -> Floats:
        index = np.searchsorted(self.time, time, side="right")
        return np.append(0.0, self.value)[index]


@dataclass(frozen=True)
class Series:
    """Between ``edge[i]`` and ``edge[i + 1]`` (seconds, [B + 1]) the mean over time and the most, [B] each."""

    edge: Floats
    mean: Floats
    most: Floats

    @property
    def overall(self) -> float:
        """The mean over all time."""
        return float(np.average(self.mean, weights=np.diff(self.edge)))


def binned(steps: Steps, begin: float, end: float, points: int = MOST_POINTS) -> Series:
    """The steps between two times themselves, or where they are more than ``points``, so many bins of equal length."""
    inside = steps.time[(steps.time > begin) & (steps.time < end)]
    moments = np.concatenate(([begin], inside, [end]))
    if len(moments) - 1 <= points:
        value = steps.at(moments[:-1])
        return Series(moments, value, value)
    edge = np.linspace(begin, end, points + 1)
    moments = np.unique(np.concatenate((edge, inside)))
    value = steps.at(moments[:-1])
    first = np.searchsorted(moments, edge[:-1])
    area = np.add.reduceat(value * np.diff(moments), first)
    return Series(edge, area / np.diff(edge), np.maximum.reduceat(value, first))


def allocated(pieces: Allocations) -> Steps:
    """GPUs that jobs hold."""
    return Steps.of(np.concatenate((pieces.start, pieces.end)), np.concatenate((pieces.milli, -pieces.milli)))


def waiting(result: Result, gpus: bool = False) -> Steps:
    """Jobs that wait, for their start or after a preemption, or the GPUs that they request; without those that can
    never run."""
    jobs, held = result.jobs, result.stretches
    able = np.ones(len(jobs), bool)
    able[list(result.unschedulable)] = False
    started, stopped = able[held.job] & ~np.isnan(held.begin), result.stopped
    weight = jobs.gpus * jobs.milli if gpus else np.full(len(jobs), WHOLE)
    return Steps.of(
        np.concatenate((jobs.submit[able], held.begin[started], held.end[stopped])),
        np.concatenate((weight[able], -weight[held.job[started]], weight[held.job[stopped]])),
    )


def stranded(pieces: Allocations, capacity: NDArray[np.int64]) -> Steps:
    """External fragmentation: free GPUs, and free parts of them, on nodes of which others are allocated.

    Args:
        capacity: GPUs of each node, [N].
    """
    time = np.concatenate((pieces.start, pieces.end))
    node = np.concatenate((pieces.node, pieces.node))
    change = np.concatenate((pieces.milli, -pieces.milli))
    order = np.lexsort((time, node))
    time, node = time[order], node[order]
    used = np.cumsum(change[order])  # a node's changes sum to 0, so the next node begins at 0 again
    last = np.append((time[1:] != time[:-1]) | (node[1:] != node[:-1]), True)[: len(time)]
    time, node, used = time[last], node[last], used[last]
    free = np.where(used > 0, WHOLE * capacity[node] - used, 0)
    return Steps.of(time, np.diff(free, prepend=0))


@dataclass(frozen=True)
class OverTime:
    """All series of a result."""

    allocated: Series
    waiting_jobs: Series
    waiting_gpus: Series
    stranded: Series


def over_time(
    result: Result, pieces: Allocations, points: int = MOST_POINTS, window: tuple[float, float] | None = None
) -> OverTime:
    """Between two times, by default those that pictures of this result alone show."""
    steps = (
        allocated(pieces), waiting(result), waiting(result, gpus=True), stranded(pieces, result.cluster.gpus),
    )  # fmt: skip
    return OverTime(*(binned(each, *(window or span(result)), points) for each in steps))
