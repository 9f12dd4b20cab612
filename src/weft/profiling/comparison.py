"""Two profiles side by side: which operators got faster or slower, which are new or gone."""

from dataclasses import asdict, dataclass
from typing import Any

from weft.profiling.tables import Profile

SAME = 0.05  # relative change up to which an operator is called unchanged
LEAST_MS = 0.005  # and change in milliseconds: kernels of a microsecond vary by half of it


@dataclass
class Change:
    operator: str
    phase: str
    before_ms: float
    after_ms: float
    verdict: str  # faster, slower, same, new, gone

    @property
    def change_ms(self) -> float:
        return self.after_ms - self.before_ms


@dataclass
class Comparison:
    """Times are milliseconds a step, or in all where a profile has no steps."""

    before: str
    after: str
    before_ms: float
    after_ms: float
    each: str
    changes: list[Change]
    idle: list[tuple[str, float, float]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(before: Profile, after: Profile) -> Comparison:
    """The changes from one profile to another, the largest first. Rows that differ in dtype or module alone count as one.

    Raises:
        ValueError: one has steps and the other has none, so that their times do not compare.
    """
    if bool(before.steps) != bool(after.steps):
        without = before if not before.steps else after
        raise ValueError(
            f"{without.source} has no steps and the other has some; record both with steps, or both without"
        )
    a, b = _times(before), _times(after)
    changes = [
        Change(*key, a.get(key, 0.0), b.get(key, 0.0), _verdict(a.get(key), b.get(key)))
        for key in dict.fromkeys((*a, *b))
    ]
    idle_a = {i.cause: i.time_us / before.repeats / 1e3 for i in before.idle}
    idle_b = {i.cause: i.time_us / after.repeats / 1e3 for i in after.idle}
    return Comparison(
        before.source,
        after.source,
        before.window_us / before.repeats / 1e3,
        after.window_us / after.repeats / 1e3,
        "a step" if before.steps else "in all",
        sorted(changes, key=lambda c: -abs(c.change_ms)),
        [(cause, idle_a.get(cause, 0.0), idle_b.get(cause, 0.0)) for cause in dict.fromkeys((*idle_a, *idle_b))],
    )


def _times(p: Profile) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for row in p.rows:
        key = (row.operator, row.phase)
        found[key] = found.get(key, 0.0) + row.time_us / p.repeats / 1e3
    return found


def _verdict(before: float | None, after: float | None) -> str:
    if before is None:
        return "new"
    if after is None:
        return "gone"
    if abs(after - before) <= max(SAME * max(before, after), LEAST_MS):
        return "same"
    return "faster" if after < before else "slower"
