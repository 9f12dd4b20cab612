"""When generated jobs arrive: a Poisson process whose rate follows the hour, the weekday and optionally a random level."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HOURS, WEEKDAYS = 24, 7
CHUNK = 60 * HOURS * WEEKDAYS  # hours that are drawn at once: memory is small however low the rate is
MOST_BURST = 1000.0


@dataclass(frozen=True)
class Arrivals:
    """The rate in an hour is ``per_day / 24`` times the hour's factor, the weekday's and a level.

    Args:
        per_day: jobs a day in the long run; 0 where only a load will say.
        hours: 24 factors, the first for the hour that begins at second 0; only their proportions count.
        weekdays: 7 factors, the first for the day that begins at second 0; likewise.
        burst: variance of the level, whose mean is 1 (gamma, so that counts of an hour are negative binomial); 0 for none.
        hold: chance that an hour has the level of the hour before it; else a new level is drawn.
        calendar: hour 0 is known to begin at midnight and day 0 to be a Monday; else they are only periods.
    """

    per_day: float = 0.0
    hours: tuple[float, ...] = (1.0,) * HOURS
    weekdays: tuple[float, ...] = (1.0,) * WEEKDAYS
    burst: float = 0.0
    hold: float = 0.0
    calendar: bool = False

    def __post_init__(self) -> None:
        for name, length in (("hours", HOURS), ("weekdays", WEEKDAYS)):
            row = getattr(self, name)
            if len(row) != length or not all(0 <= value < math.inf for value in row) or not sum(row) > 0:
                raise ValueError(f"arrivals: {name} are {list(row)}; expected {length} factors of 0 or more, not all 0")
        for name, most in (("per_day", math.inf), ("burst", MOST_BURST), ("hold", 0.999)):
            if not 0 <= getattr(self, name) <= most or not math.isfinite(getattr(self, name)):
                raise ValueError(f"arrivals: {name} is {getattr(self, name)}; expected 0 to {most}")

    @property
    def week(self) -> NDArray[np.float64]:
        """The factor of each hour of a week, [168]; their mean is 1."""
        factors = np.outer(self.weekdays, self.hours).ravel()
        return factors / factors.mean()

    def draw(self, count: int, per_second: float, g: np.random.Generator) -> NDArray[np.float64]:
        """Seconds of the first ``count`` arrivals, ascending, [count].

        Exact, by inversion (Çinlar 1975): arrivals of a process of rate 1 are taken back through the integral of the rate,
        which is a straight line within an hour.
        """
        due = np.cumsum(g.exponential(1.0, count)) / (per_second * 3600)  # in hours of the mean rate
        if not self.burst:
            weeks, rest = np.divmod(due, HOURS * WEEKDAYS)
            return (weeks * HOURS * WEEKDAYS + _when(rest, _integral(self.week))) * 3600
        found, begin, level = [], 0, 1.0
        while len(due):
            levels = self._levels(level, g)
            level = levels[-1]
            reached = _integral(np.tile(self.week, CHUNK // (HOURS * WEEKDAYS)) * levels)
            here = int(np.searchsorted(due, reached[-1]))
            found.append(begin + _when(due[:here], reached))
            due, begin = due[here:] - reached[-1], begin + CHUNK
        return np.concatenate(found) * 3600

    def _levels(self, before: float, g: np.random.Generator) -> NDArray[np.float64]:
        """The levels of the next hours, [CHUNK]."""
        drawn = g.gamma(1 / self.burst, self.burst, CHUNK)
        new = g.random(CHUNK) >= self.hold
        since = np.maximum.accumulate(np.where(new, np.arange(CHUNK), -1))
        return np.where(since >= 0, drawn[since], before)


def _integral(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate(([0.0], np.cumsum(rates)))


def _when(due: NDArray[np.float64], reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hours after which the integral, known at each full hour, reaches what is due; never within an hour that adds nothing."""
    hour = np.clip(np.searchsorted(reached, due, side="right") - 1, 0, len(reached) - 2)
    rate = reached[hour + 1] - reached[hour]
    passed: NDArray[np.float64] = np.divide(due - reached[hour], rate, out=np.ones(len(due)), where=rate > 0)
    return hour + passed
