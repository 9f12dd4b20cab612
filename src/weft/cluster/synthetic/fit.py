"""A profile fitted to a trace: what its jobs are like, by moments and quantiles; nothing is optimised."""

from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import WHOLE, Jobs
from weft.cluster.synthetic.arrivals import HOURS, MOST_BURST, WEEKDAYS, Arrivals
from weft.cluster.synthetic.distributions import Quantiles
from weft.cluster.synthetic.profile import RECENT, Profile, Request, Size, Tenant

LEAST = 20  # jobs that have a curve or a mix of their own; fewer share one with their neighbours
LAGS = (1, 2, 4, 8, 16, 32, 64)  # jobs apart, at which likeness is measured
MOST_ALIKE = 0.95  # the same durations to the second are no two jobs'
DAY, HOUR = 86400, 3600
MOMENT, LONGEST = 0.001, 1000 * 366 * DAY  # seconds between the first and the last job


def fit(jobs: Jobs, begins: datetime | None = None) -> Profile:
    """The profile of a trace.

    Sizes are GPUs of a job, those with fewer than 20 jobs together with the next larger ones. Within a size what a job requests
    does not depend on how long it runs. Tenants have a mix of sizes of their own from 20 jobs on, and durations of their own
    for each size of which they have 20. A trend is not kept: a trace that begins with empty weeks is best cut first.

    Args:
        begins: the date and local time of second 0 of the trace. Without it hour 0 begins with the first arrival, and hours
            and weekdays are only periods of 24 hours and 7 days.

    Raises:
        ValueError: fewer than two jobs, all at one time (1 ms), or times that are no seconds.
    """
    if len(jobs) < 2:
        raise ValueError(f"fit: the trace has {len(jobs)} jobs; expected at least two")
    span = jobs.submit[-1] - jobs.submit[0]
    if span < MOMENT:
        raise ValueError(
            f"fit: all {len(jobs)} jobs are submitted at {jobs.submit[0]:g} s; expected more than one time, to know a rate"
        )
    if span > LONGEST:
        raise ValueError(
            f"fit: {span:g} s lie between the first and the last job; expected seconds, of 1,000 years at most"
        )
    size, names = _sizes(jobs)
    own_mix, own_curve = _own(jobs, size)
    kind = _numbered(jobs.tenant, size, *(getattr(jobs, name) for name in REQUEST))
    curve = _numbered(size, np.where(own_curve, jobs.tenant, -1))
    repeat, alike = _likeness(kind, _ranks(jobs.duration, curve))
    return Profile(
        {name: _size(jobs, size == k, own_mix, own_curve) for k, name in enumerate(names)},
        {name: _tenant(jobs, jobs.tenant == t, size, names, own_curve, own_mix) for t, name in _present(jobs)},
        _arrivals(jobs, begins),
        repeat,
        alike,
        f"fitted to {len(jobs):,} jobs of {span / DAY:.1f} days",
    )


# ---- sizes and tenants -----------------------------------------------------------------------------------------------

REQUEST = ("gpus", "milli", "pods", "gpu_memory", "cpu", "memory", "types", "priority")


def _sizes(jobs: Jobs) -> tuple[NDArray[np.int64], list[str]]:
    """The size of each job, [J], and the names of the sizes: consecutive amounts of GPUs with at least 20 jobs together."""
    amounts, of, counts = np.unique(jobs.gpus * jobs.milli, return_inverse=True, return_counts=True)
    size_of, together = np.zeros(len(amounts), np.int64), 0
    for k, count in enumerate(counts):
        size_of[k] = size_of[k - 1] + (together >= LEAST) if k else 0
        together = count + (together if together < LEAST else 0)
    if together < LEAST and size_of[-1]:
        size_of[size_of == size_of[-1]] -= 1  # too few are left at the end
    names = []
    for k in range(size_of[-1] + 1):
        ends = amounts[size_of == k] / WHOLE
        names.append(f"{ends[0]:g}" + (f"-{ends[-1]:g}" if len(ends) > 1 else ""))
    return size_of[of], names


def _own(jobs: Jobs, size: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether the tenant of each job has a mix of sizes of its own, and durations of its own for the job's size, [J]."""
    counts = np.zeros((len(jobs.tenants), size.max() + 1), np.int64)
    np.add.at(counts, (jobs.tenant, size), 1)
    if (counts.sum(1) > 0).sum() == 1:
        return np.zeros(len(jobs), bool), np.zeros(len(jobs), bool)
    return counts.sum(1)[jobs.tenant] >= LEAST, counts[jobs.tenant, size] >= LEAST


def _present(jobs: Jobs) -> list[tuple[int, str]]:
    return [(int(t), jobs.tenants[t]) for t in np.unique(jobs.tenant)]


def _size(jobs: Jobs, here: NDArray[np.bool_], own_mix: NDArray[np.bool_], own_curve: NDArray[np.bool_]) -> Size:
    columns = np.stack([getattr(jobs, name)[here].astype(float) for name in REQUEST], 1)
    rows, counts = np.unique(columns, axis=0, return_counts=True)
    requests = []
    for row, count in zip(rows, counts, strict=True):
        fields: dict[str, Any] = {name: int(value) for name, value in zip(REQUEST, row, strict=True)}
        fields |= {"types": jobs.type_sets[fields["types"]], "gpu_memory": float(row[3]), "priority": float(row[7])}
        requests.append(Request(**fields, share=float(count / here.sum())))
    shared = here & ~own_curve
    ratio = jobs.estimate[here & (jobs.duration > 0)] / jobs.duration[here & (jobs.duration > 0)]
    return Size(
        float(np.mean(here if own_mix.all() else here[~own_mix])),
        tuple(requests),
        Quantiles.of(jobs.duration[shared if shared.sum() >= LEAST else here]),
        Quantiles.of(ratio) if (ratio != 1).any() else None,
    )


def _tenant(
    jobs: Jobs, here: NDArray[np.bool_], size: NDArray[np.int64], names: list[str], own_curve: Any, own_mix: Any
) -> Tenant:
    counts = np.bincount(size[here], minlength=len(names))
    curves = {name: here & own_curve & (size == k) for k, name in enumerate(names)}
    return Tenant(
        float(here.mean()),
        {name: float(c / here.sum()) for name, c in zip(names, counts, strict=True) if c} if own_mix[here][0] else {},
        {name: Quantiles.of(jobs.duration[rows]) for name, rows in curves.items() if rows.any()},
    )


# ---- campaigns -------------------------------------------------------------------------------------------------------


def _likeness(kind: NDArray[np.int64], rank: NDArray[np.float64]) -> tuple[float, float]:
    """``repeat`` from how much more often than by chance jobs some places apart are of one kind (tenant and request), and
    ``alike`` from how much the ranks of durations are correlated, which only those of one campaign are."""
    lags = [lag for lag in LAGS if 4 * lag <= len(kind)]
    chance = float((np.bincount(kind) ** 2).sum() / len(kind) ** 2)
    if not lags or chance == 1:
        return 0.0, 0.0
    together = float(np.mean([(kind[lag:] == kind[:-lag]).mean() - chance for lag in lags])) / (1 - chance)
    if together < 3 * np.sqrt(chance / (1 - chance) / len(kind) / len(lags)):  # no more than chance
        return 0.0, 0.0
    centred = rank - 0.5
    correlated = float(
        np.mean([(centred[lag:] * centred[:-lag]).mean() for lag in lags]) / max((centred**2).mean(), 1e-9)
    )
    alike = 2 * np.sin(np.pi / 6 * correlated / together)  # from ranks' correlation to that of normal scores
    return _repeat(together, lags), float(np.clip(alike if correlated < together else 1, 0, MOST_ALIKE))


def _repeat(together: float, lags: list[int]) -> float:
    """The chance to repeat that makes jobs ``lags`` apart so often of one campaign, by bisection.

    s(k), the chance of one campaign for jobs k apart, is repeat · Σ P(d) · s(|k − d|): the later job repeats one d before it.
    """
    apart = np.arange(1, RECENT)
    chance = np.log1p(1 / apart) / np.log(RECENT)  # P(d)
    step = np.zeros((RECENT, RECENT))
    for k in apart:
        np.add.at(step[k], np.abs(k - apart), chance)
    low, high = 0.0, 0.9999
    for _ in range(40):
        middle = (low + high) / 2
        s = np.linalg.solve(np.eye(RECENT) - middle * step, np.eye(RECENT)[0])
        low, high = (middle, high) if s[lags].mean() < together else (low, middle)
    return low


def _ranks(values: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean rank of each value in its group, from 0 to 1; equal values have equal ranks."""
    rank = np.empty(len(values))
    for k in range(group.max() + 1):
        rows = np.flatnonzero(group == k)
        _, place, count = np.unique(values[rows], return_inverse=True, return_counts=True)
        rank[rows] = ((np.cumsum(count) - count / 2) / len(rows))[place]
    return rank


def _numbered(*columns: Any) -> NDArray[np.int64]:
    """The same number for rows with the same values."""
    found = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, index = np.unique(column, return_inverse=True)
        _, found = np.unique(found * (int(index.max()) + 1) + index, return_inverse=True)
    return found


# ---- arrivals --------------------------------------------------------------------------------------------------------


def _arrivals(jobs: Jobs, begins: datetime | None) -> Arrivals:
    """Factors of hours and weekdays by the method of a Poisson regression with two factors; from two days on, and two weeks."""
    since_monday = (
        begins.weekday() * DAY + begins.hour * HOUR + begins.minute * 60 + begins.second if begins else -jobs.submit[0]
    )
    at = (jobs.submit + since_monday) / HOUR
    first, span = int(at[0]), at[-1] - at[0]
    count = np.bincount(at.astype(np.int64) - first).astype(float)
    every = np.arange(first, first + len(count))
    seen = np.minimum(every + 1, at[-1]) - np.maximum(every, at[0])  # of each hour; the first and the last are cut
    hour, day = every % HOURS, every // HOURS % WEEKDAYS
    hours, weekdays = np.ones(HOURS), np.ones(WEEKDAYS)
    for _ in range(20):
        if span >= 2 * HOURS:
            hours = _factors(hour, count, seen * weekdays[day], HOURS)
        if span >= 2 * HOURS * WEEKDAYS:
            weekdays = _factors(day, count, seen * hours[hour], WEEKDAYS)
    factors = seen * hours[hour] * weekdays[day]
    rate = (len(jobs) - 1) / factors.sum()
    burst, hold = _burst(count, rate * factors)
    return Arrivals(
        float(rate * HOURS), tuple(hours.tolist()), tuple(weekdays.tolist()), burst, hold, begins is not None
    )


def _factors(of: NDArray[np.int64], count: Any, exposure: Any, length: int) -> NDArray[np.float64]:
    came, exposed = np.bincount(of, count, length), np.bincount(of, exposure, length)
    factors = np.divide(came, exposed, out=np.zeros(length), where=exposed > 0)
    return factors / factors.mean()


def _burst(count: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[float, float]:
    """Variance of an hour's level, from what counts vary beyond Poisson's, and how much of it the next hour keeps."""
    over = count - expected
    squares = float((expected**2).sum())
    burst = (float((over**2).sum()) - float(count.sum())) / squares
    if burst < 3 * np.sqrt(2 / squares):  # no more than chance
        return 0.0, 0.0
    kept = float((over[1:] * over[:-1]).sum() / max((expected[1:] * expected[:-1]).sum(), 1e-9)) / burst
    return min(burst, MOST_BURST), float(np.clip(kept, 0, 0.99))
