"""What jobs held, what became of it, and sums of it.

*Goodput* are GPU hours of work that lasted; *badput* those that did not, by reason. Where a source measures utilisation, GPUs
that were held and idle are badput too. Where it does not, ``used`` is unknown, which is not 0.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEYS = ("team", "user", "job")


@dataclass(frozen=True)
class Usage:
    """A job, or a part of one.

    Args:
        gpu_hours: allocated, in whole GPUs: shares of a GPU count as parts of it.
        used_hours: of these, the time at work (utilisation × time); None where the source does not say.
        bad_hours: reason → of these, what was in vain.
        open_hours: of a job that still runs: what it is good for is not known yet.
        price: money for a GPU hour.
    """

    team: str
    user: str
    job: str
    pool: str
    gpu_hours: float
    used_hours: float | None = None
    bad_hours: Mapping[str, float] = field(default_factory=dict)
    open_hours: float = 0.0
    price: float = 0.0


@dataclass(frozen=True)
class Period:
    """What a source says.

    Args:
        begin, end: seconds since 1970, or since the trace began.
        capacity_hours: GPU hours that were there; None where the cluster is not known.
        capacity_cost: what these cost.
        notes: what was left out or assumed, a sentence each.
    """

    usages: list[Usage]
    begin: float
    end: float
    capacity_hours: float | None = None
    capacity_cost: float = 0.0
    currency: str = ""
    source: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class Sum:
    jobs: int = 0
    gpu_hours: float = 0.0
    cost: float = 0.0
    used_hours: float | None = 0.0  # None as soon as one is unknown
    good_hours: float = 0.0
    open_hours: float = 0.0
    bad_hours: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bad_cost: float = 0.0

    def add(self, usage: Usage) -> None:
        self.jobs += 1
        self.gpu_hours += usage.gpu_hours
        self.cost += usage.gpu_hours * usage.price
        unknown = self.used_hours is None or usage.used_hours is None
        self.used_hours = None if unknown else self.used_hours + usage.used_hours  # type: ignore[operator]
        bad = math.fsum(usage.bad_hours.values())
        for reason, hours in usage.bad_hours.items():
            self.bad_hours[reason] += hours
        self.open_hours += usage.open_hours
        self.good_hours += usage.gpu_hours - bad - usage.open_hours
        self.bad_cost += bad * usage.price

    def as_json(self) -> dict[str, Any]:
        decided = self.gpu_hours - self.open_hours
        return {
            "jobs": self.jobs,
            "gpu_hours": self.gpu_hours,
            "used_hours": self.used_hours,
            "held_idle_hours": None if self.used_hours is None else self.gpu_hours - self.used_hours,
            "cost": self.cost,
            "goodput_hours": self.good_hours,
            "goodput": self.good_hours / decided if decided else None,
            "badput_hours": dict(sorted(self.bad_hours.items())),
            "badput_cost": self.bad_cost,
            "open_hours": self.open_hours,
        }


def sums(usages: Iterable[Usage], key: str) -> dict[str, Sum]:
    """By team, user or job; the most expensive first, then by name."""
    found: dict[str, Sum] = defaultdict(Sum)
    for usage in usages:
        found[getattr(usage, key)].add(usage)
    return dict(sorted(found.items(), key=lambda item: (-item[1].cost, -item[1].gpu_hours, item[0])))


def report(period: Period) -> dict[str, Any]:
    """The object of ``weft cost --json``."""
    total = Sum()
    for usage in period.usages:
        total.add(usage)
    capacity = period.capacity_hours
    idle = None if capacity is None else capacity - total.gpu_hours
    return {
        "source": period.source,
        "begin": period.begin,
        "end": period.end,
        "currency": period.currency,
        "capacity_hours": capacity,
        "capacity_cost": period.capacity_cost if capacity is not None else None,
        "unallocated_hours": idle,
        "allocation": total.gpu_hours / capacity if capacity else None,
        "total": total.as_json(),
        **{f"by_{key}": {name: each.as_json() for name, each in sums(period.usages, key).items()} for key in KEYS},
        "notes": period.notes,
    }
