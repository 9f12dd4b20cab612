"""Jobs by how many GPUs they ask, and how their times are spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.cluster import metrics
from weft.cluster.groups import CLASSES, members
from weft.cluster.result import Result

__all__ = ["CLASSES", "members", "quantiles", "times"]

MOST_QUANTILES = 160


def times(result: Result) -> dict[str, NDArray[np.float64]]:
    """Job completion time and wait (seconds) and slowdown (times) of every job, [J]; NaN for one that never started."""
    found = metrics.times(result)
    return {"jct": found["jct"], "wait": found["queueing"], "slowdown": found["slowdown"]}


def quantiles(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Values and the share of all that are at most so large: each value, or evenly spread ones of many."""
    ordered = np.sort(values)
    rank = np.unique(np.linspace(1, len(ordered), min(len(ordered), MOST_QUANTILES)).round().astype(np.int64))
    return ordered[rank - 1], rank / max(len(ordered), 1)
