"""What a cluster's jobs are like, as numbers that can be stated, fitted to a trace, saved, and made into jobs again.

A job belongs to a tenant, the tenant's mix says its size, and the size says what it requests and how long it runs. Users submit
the same thing again and again: with the chance ``repeat`` a job is one more of the campaign of a recent job.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import WHOLE, Cluster, Jobs
from weft.cluster.synthetic.arrivals import Arrivals
from weft.cluster.synthetic.distributions import LogNormal, Quantiles, Quantity
from weft.cluster.synthetic.generate import SIZES
from weft.cluster.trace import accepted, names
from weft.definition import UnknownName
from weft.words import count

DEFAULT_DURATIONS = LogNormal(600.0, 2.0)
MOST_TENANTS = 1_000_000
RECENT = 100  # a job that repeats does so of one that came up to 99 before it; chance about 1 / distance


@dataclass(frozen=True)
class Request:
    """What a job requests, as the columns of ``Jobs``; ``types`` are the accelerator types that it accepts, none for any."""

    gpus: int
    milli: int = WHOLE
    pods: int = 0
    gpu_memory: float = 0.0
    cpu: int = 0
    memory: int = 0
    types: tuple[str, ...] = ()
    priority: float = 0.0
    share: float = 1.0  # of the jobs of its size

    def __post_init__(self) -> None:
        if self.gpus < 0 or not 1 <= self.milli <= WHOLE or self.pods < 0 or (self.pods and self.gpus % self.pods):
            raise ValueError(
                f"request: {self.gpus} GPUs, {self.milli} thousandths of each, {self.pods} pods; expected 0 GPUs or more, 1 to "
                f"{WHOLE} thousandths, equal pods"
            )


@dataclass(frozen=True)
class Size:
    """Jobs of about the same number of GPUs.

    Args:
        share: of the jobs of those tenants that have no mix of their own.
        durations: seconds.
        estimates: estimate ÷ duration; None where the estimate is the duration.
    """

    share: float
    requests: tuple[Request, ...]
    durations: Quantity
    estimates: Quantity | None = None


@dataclass(frozen=True)
class Tenant:
    """Args:
    share: of all jobs.
    sizes: size → share of the tenant's jobs; everyone's where empty.
    durations: size → seconds, where they differ from everyone's.
    """

    share: float
    sizes: Mapping[str, float] = field(default_factory=dict)
    durations: Mapping[str, Quantity] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """Args:
    sizes: by a name; ``"8"`` or ``"16-32"`` where it was fitted.
    tenants: by name; one called "" means a trace without tenants.
    repeat: the chance that a job is one more of the campaign of a recent job: the same tenant and request.
    alike: 0 to 1, the correlation of the durations within a campaign (of their normal scores).
    source: where it comes from, for readers of the file.

    Raises:
        ValueError: shares below 0 or all 0, chances that are none.
        UnknownName: a tenant names a size that there is not.
    """

    sizes: Mapping[str, Size]
    tenants: Mapping[str, Tenant] = field(default_factory=lambda: {"": Tenant(1.0)})
    arrivals: Arrivals = field(default_factory=Arrivals)
    repeat: float = 0.0
    alike: float = 0.0
    source: str = "stated"

    def __post_init__(self) -> None:
        _shares("sizes", {name: size.share for name, size in self.sizes.items()})
        _shares("tenants", {name: tenant.share for name, tenant in self.tenants.items()})
        for name, size in self.sizes.items():
            _shares(f"requests of size '{name}'", {str(k): r.share for k, r in enumerate(size.requests)})
        for name, tenant in self.tenants.items():
            if tenant.sizes:
                _shares(f"sizes of tenant '{name}'", tenant.sizes)
            for named in (*tenant.sizes, *tenant.durations):
                if named not in self.sizes:
                    raise UnknownName(f"size of tenant '{name}'", named, self.sizes)
        if not 0 <= self.repeat < 1 or not 0 <= self.alike <= 1:
            raise ValueError(
                f"profile: repeat is {self.repeat} and alike is {self.alike}; expected 0 ≤ repeat < 1, 0 ≤ alike ≤ 1"
            )

    def __str__(self) -> str:
        return self.describe()

    def describe(self, rate: float = 0.0) -> str:
        """A few lines for people.

        Args:
            rate: jobs a second, where a load makes it another than the profile's own (:meth:`rate`).
        """
        total = self.mix.sum(0)
        by_size = sorted(zip(total, self.sizes, strict=True), reverse=True)[:8]
        per_day = rate * 86400 or self.arrivals.per_day
        arrivals = f"{per_day:,.{0 if per_day >= 10 else 2}f} jobs a day" if per_day else "arrivals as a load says"
        return "\n".join(
            (
                f"{arrivals}, {self.gpu_seconds / 3600:,.2f} GPU hours a job ({self.source})",
                "GPUs of a job: " + ", ".join(f"{name} {share:.1%}" for share, name in by_size),
                f"{count(len(self.tenants), 'tenant')}, burst {self.arrivals.burst:.3g} held {self.arrivals.hold:.2f}, "
                f"repeat {self.repeat:.2f} alike {self.alike:.2f}",
            )
        )

    # ---- what follows from it ----------------------------------------------------------------------------------------

    @property
    def mix(self) -> NDArray[np.float64]:
        """The share of all jobs that a tenant's jobs of a size are, [tenants, sizes]."""
        mix = np.tile([size.share for size in self.sizes.values()], (len(self.tenants), 1))
        for k, tenant in enumerate(self.tenants.values()):
            if tenant.sizes:
                mix[k] = [tenant.sizes.get(size, 0.0) for size in self.sizes]
        share = np.array([t.share for t in self.tenants.values()])
        return mix / mix.sum(1, keepdims=True) * (share / share.sum())[:, None]

    def durations(self, tenant: str, size: str) -> Quantity:
        return self.tenants[tenant].durations.get(size, self.sizes[size].durations)

    @property
    def gpu_seconds(self) -> float:
        """The mean of GPUs × duration over jobs; shares of a GPU count as such."""
        requested = [
            sum(r.share * r.gpus * r.milli / WHOLE for r in s.requests) / sum(r.share for r in s.requests)
            for s in self.sizes.values()
        ]
        mean = np.tile([size.durations.mean for size in self.sizes.values()], (len(self.tenants), 1))
        for k, (name, tenant) in enumerate(self.tenants.items()):
            if tenant.durations:
                mean[k] = [self.durations(name, size).mean for size in self.sizes]
        return float((self.mix * mean * requested).sum())

    def rate(self, load: float | None = None, cluster: Cluster | None = None) -> float:
        """Jobs a second: of the profile, or such that in the long run ``load`` of the cluster's GPUs are requested.

        Raises:
            ValueError: one of the two without the other, a load that is not above 0, no GPU that is requested or exists.
        """
        if (load is None) != (cluster is None):
            raise ValueError(
                "generate: load and cluster go together; expected both, or neither for the profile's own rate"
            )
        if load is None or cluster is None:
            if not self.arrivals.per_day:
                raise ValueError(
                    "generate: the profile says no rate of arrivals (per_day); expected a load and a cluster"
                )
            return self.arrivals.per_day / 86400
        if not 0 < load < math.inf or not cluster.total_gpus:
            raise ValueError(f"generate: a load of {load} on {cluster.total_gpus} GPUs; expected both above 0")
        if not self.gpu_seconds > 0:
            raise ValueError(
                "generate: no job of the profile requests a GPU for any time; expected one that does, for a load"
            )
        return load * cluster.total_gpus / self.gpu_seconds

    def generate(self, count: int, *, seed: int = 0, load: float | None = None, cluster: Cluster | None = None) -> Jobs:
        """Jobs like those that the profile describes, times to the millisecond.

        Args:
            count: jobs.
            seed: the same seed gives the same trace, and with another load the same jobs at other times.
            load, cluster: see :meth:`rate`.

        Raises:
            ValueError: a count below 1, or what :meth:`rate` raises.
        """
        if count < 1:
            raise ValueError(f"generate: count is {count}; expected 1 job or more")
        when, what = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
        submit = self.arrivals.draw(count, self.rate(load, cluster), when)
        jobs = Jobs(np.round(submit, 3), **self._jobs(count, what))
        jobs.generated = True
        return jobs

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _jobs(self, count: int, g: np.random.Generator) -> dict[str, Any]:
        """The columns of ``Jobs`` but ``submit``."""
        campaign = campaigns(count, self.repeat, g)
        cell = _choose(self.mix.ravel(), g.random(count))[campaign]
        tenant, size = np.divmod(cell, len(self.sizes))
        of_request = g.random(count)[campaign]
        ratio = g.standard_normal(count)[campaign]
        z = math.sqrt(self.alike) * g.standard_normal(count)[campaign]
        z += math.sqrt(1 - self.alike) * g.standard_normal(count)

        tenants, sizes = list(self.tenants), list(self.sizes)
        requests: list[Request] = []
        request, duration, estimate = np.zeros(count, np.int64), np.zeros(count), np.ones(count)
        for k, rows in _groups(size):
            of = self.sizes[sizes[k]]
            request[rows] = len(requests) + _choose([r.share for r in of.requests], of_request[rows])
            requests += of.requests
            if of.estimates:
                estimate[rows] = of.estimates.at(ratio[rows])
        for k, rows in _groups(cell):
            duration[rows] = self.durations(tenants[k // len(sizes)], sizes[k % len(sizes)]).at(z[rows])
        duration = np.round(duration, 3)

        columns = ("gpus", "milli", "pods", "gpu_memory", "cpu", "memory", "priority")
        made: dict[str, Any] = {name: np.array([getattr(r, name) for r in requests])[request] for name in columns}
        kinds = ["|".join(r.types) for r in requests]
        made["types"], made["type_sets"] = accepted(kinds[r] for r in request)
        made["tenant"], made["tenants"] = names(tenants[t] for t in tenant)
        return made | {"duration": duration, "estimate": np.round(duration * estimate, 3)}


def campaigns(count: int, repeat: float, g: np.random.Generator) -> NDArray[np.int64]:
    """For each job the first of its campaign, [count]: itself, or with the chance ``repeat`` that of a recent job."""
    every = np.arange(count)
    back = (RECENT ** g.random(count)).astype(np.int64)
    first = np.where((g.random(count) < repeat) & (back <= every), every - back, every)
    while ((before := first[first]) != first).any():
        first = before
    return first


def stated(
    *,
    sizes: Mapping[int, float] = SIZES,
    durations: LogNormal | Mapping[int, LogNormal] = DEFAULT_DURATIONS,
    tenants: int | Mapping[str, float] = 1,
    priorities: Mapping[float, float] | None = None,
    over_estimate: float = 1.0,
    arrivals: Arrivals | None = None,
    repeat: float = 0.0,
    alike: float = 0.0,
) -> Profile:
    """A profile from a few numbers.

    Args:
        sizes: GPUs of a job → share of jobs.
        durations: of all jobs, or GPUs of a job → of those (each size then).
        tenants: name → share of jobs; or so many, whose shares are as 1, 1/2, 1/3 … (Zipf).
        priorities: priority → share of jobs of every size.
        over_estimate: a user's estimate is 1 to so many times the duration.

    Raises:
        ValueError: shares below 0 or all 0, a size without durations, too many tenants.
    """
    if not 1 <= over_estimate < math.inf:
        raise ValueError(f"profile: over_estimate is {over_estimate}; expected 1 or more")
    if isinstance(tenants, int):
        if tenants > MOST_TENANTS:
            raise ValueError(f"profile: {tenants:,} tenants; expected at most {MOST_TENANTS:,}")
        tenants = {f"tenant-{k}" if tenants > 1 else "": 1 / k for k in range(1, tenants + 1)}
    if isinstance(durations, Mapping) and (missing := sorted(set(sizes) - set(durations))):
        raise ValueError(f"profile: durations of jobs of {missing} GPUs are missing; expected those of every size")
    made = {}
    for gpus, share in sizes.items():
        requests = tuple(Request(gpus, priority=p, share=s) for p, s in (priorities or {0.0: 1.0}).items())
        of = durations[gpus] if isinstance(durations, Mapping) else durations
        estimates = Quantiles((0.0, 1.0), (1.0, float(over_estimate))) if over_estimate > 1 else None
        made[str(gpus)] = Size(share, requests, of, estimates)
    return Profile(
        made, {name: Tenant(share) for name, share in tenants.items()}, arrivals or Arrivals(), repeat, alike
    )


def _shares(what: str, shares: Mapping[str, float]) -> None:
    wrong = {name: share for name, share in shares.items() if not 0 <= share < math.inf}
    if wrong or not sum(shares.values()) > 0:
        raise ValueError(f"profile: shares of {what} are {wrong or dict(shares)}; expected 0 or more, not all 0")


def _choose(shares: Any, u: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices with chances in proportion to the shares, from numbers of [0, 1)."""
    edges = np.cumsum(np.asarray(shares, float))
    return np.searchsorted(edges, u * edges[-1], side="right")


def _groups(of: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """Every index that there is with its rows."""
    order = np.argsort(of, kind="stable")
    kinds, begins = np.unique(of[order], return_index=True)
    return list(zip(kinds.tolist(), np.split(order, begins[1:]), strict=True))
