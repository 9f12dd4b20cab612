"""The time axis of pictures: which seconds they show, and how seconds are written."""

import math
from typing import Any

import numpy as np

from weft.cluster.result import Result
from weft.drawing.quantities import NONE, SPACE, figures, known

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
TAIL = 0.15  # of the time until the last start


def unit(seconds: float) -> tuple[str, float]:
    """The largest unit of which ``seconds`` are at least three, and its length: ``"h", 3600.0``."""
    name = next((name for name in reversed(UNITS) if seconds >= 3 * UNITS[name]), "s")
    return name, UNITS[name]


def text(seconds: Any, digits: int = 3, space: str = SPACE) -> str:
    """``5,400`` → ``90.0 min``."""
    if not known(seconds):
        return NONE
    name, length = unit(seconds)
    return f"{figures(seconds / length, digits)}{space}{name}"


def log_start(smallest: float, largest: float) -> float:
    """Where a logarithmic axis of seconds begins: a power of ten below the smallest value above 0, at most six decades deep,
    and at a second where the largest is beyond 100 s."""
    low = max(smallest, largest / 1e6, 1.0 if largest > 100 else 0.0)
    return 10.0 ** math.floor(math.log10(low))


def span(result: Result) -> tuple[float, float]:
    """The seconds that pictures show: from the first arrival to the last completion. Never empty.

    Durations have long tails, and nothing is decided after the last start: when completions go on for long after it,
    pictures end a while after it. Of an interrupted result they end at it, since what came later is unknown.
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
