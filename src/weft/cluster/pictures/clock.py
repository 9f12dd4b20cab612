"""Seconds as people read them."""

from __future__ import annotations

import math
from typing import Any

from weft.drawing.quantities import NONE, SPACE, figures, known

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def unit(seconds: float) -> tuple[str, float]:
    """The largest unit that ``seconds`` have at least three of, and its length: ``"h", 3600.0``."""
    name = next((name for name in reversed(UNITS) if seconds >= 3 * UNITS[name]), "s")
    return name, UNITS[name]


def told(seconds: Any) -> str:
    """``5,400`` → ``90.0 min``."""
    if not known(seconds):
        return NONE
    name, length = unit(seconds)
    return f"{figures(seconds / length)}{SPACE}{name}"


def floor_of(smallest: float, largest: float) -> float:
    """Where a logarithmic axis of seconds begins: a power of ten below the smallest value above 0, at most six decades deep.

    At a second where the largest is beyond 100 s: nobody minds which part of a second it was.
    """
    low = max(smallest, largest / 1e6, 1.0 if largest > 100 else 0.0)
    return 10.0 ** math.floor(math.log10(low))
