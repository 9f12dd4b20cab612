"""Jobs by how many GPUs they ask, and how their times are spread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.cluster.metrics import LEAST_S
from weft.cluster.simulate import Result

CLASSES = {"1 GPU": (0, 1), "2–8 GPUs": (2, 8), "more than 8": (9, 2**62)}
MOST_QUANTILES = 160


def members(gpus: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """Which jobs belong to each size class; classes without a job are left out. Jobs without a GPU are with the smallest."""
    found = {name: (gpus >= low) & (gpus <= high) for name, (low, high) in CLASSES.items()}
    return {name: mask for name, mask in found.items() if mask.any()}


def times(result: Result) -> dict[str, NDArray[np.float64]]:
    """Job completion time and wait (seconds) and slowdown (times) of every job, [J]; NaN for one that never started."""
    jct = result.end - result.jobs.submit
    wait = result.start - result.jobs.submit
    return {"jct": jct, "wait": wait, "slowdown": jct / np.maximum(result.jobs.duration, LEAST_S)}


def quantiles(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Values and the share of all that are at most so large: each value, or evenly spread ones of many."""
    ordered = np.sort(values)
    rank = np.unique(np.linspace(1, len(ordered), min(len(ordered), MOST_QUANTILES)).round().astype(np.int64))
    return ordered[rank - 1], rank / max(len(ordered), 1)
