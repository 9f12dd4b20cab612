"""Quotas with borrowing and lending, as Kueue's ClusterQueues in one cohort, and weights of tenants.

A tenant may hold its *nominal* GPUs, and borrow up to its *borrowing limit* more. Of its nominal quota the others may
borrow up to its *lending limit*; the rest is *reserved* for it. All tenants together never hold more of the *pool* of
what is lent than there is of it, where a tenant's use counts beyond what is reserved for it. Quotas of cores and memory
are alike: a job starts only if all of them admit it. Jobs within the nominal quotas come before jobs that borrow;
otherwise the queue's order counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.files.text import TraceError
from weft.cluster.files.yaml import entries, line, mapping, root
from weft.cluster.model import WHOLE, Jobs
from weft.definition import UnknownName
from weft.words import count

OTHERS = "*"  # names the quota of every tenant that is not named
LIMITS = ("nominal", "borrowing_limit", "lending_limit")
RESOURCES = ("gpus", "cpu", "memory_gb")
UNITS = {"gpus": WHOLE, "cpu": WHOLE, "memory_gb": 1024}  # thousandths of GPUs and of cores, MiB
KEYS = ("tenant", *LIMITS, *RESOURCES[1:])
NO_TENANTS: Mapping[str, Any] = MappingProxyType({})
MOST = 1e12  # GPUs; thousandths of it are still whole numbers of 64 bits
EXAMPLE = "team-a=32,team-b=16:8:4"


@dataclass(frozen=True)
class Quota:
    """How many GPUs a tenant may hold, and how many cores and how much memory.

    Args:
        nominal: GPUs that are its own.
        borrowing_limit: GPUs of others that it may hold as well while they are free; unlimited by default.
        lending_limit: of its own, GPUs that others may borrow; all by default.
        cpu: the same of cores; without one, and where another tenant has one, 0 and it may borrow.
        memory_gb: the same of main memory in GB.

    Raises:
        ValueError: less than 0, or no number; more lent than it has; a quota of cores with one of memory in it.
    """

    nominal: float
    borrowing_limit: float = math.inf
    lending_limit: float = math.inf
    cpu: "Quota | None" = None
    memory_gb: "Quota | None" = None

    def __post_init__(self) -> None:
        if not 0 <= self.nominal < MOST:
            raise ValueError(f"the nominal quota is {self.nominal}; expected GPUs, 0 or more")
        if not self.borrowing_limit >= 0:  # NaN neither
            raise ValueError(f"the borrowing limit is {self.borrowing_limit}; expected GPUs, 0 or more")
        if not (0 <= self.lending_limit <= self.nominal or self.lending_limit == math.inf):
            raise ValueError(
                f"the lending limit is {self.lending_limit}; expected GPUs, 0 to the nominal quota, {self.nominal:g}"
            )
        for name in RESOURCES[1:]:
            of = getattr(self, name)
            if of is not None and (not isinstance(of, Quota) or of.cpu or of.memory_gb):
                raise ValueError(f"{name} is {of!r}; expected a Quota of nothing else, such as Quota(64)")

    def of(self, resource: str) -> "Quota":
        """The quota of one of RESOURCES."""
        return self if resource == RESOURCES[0] else getattr(self, resource) or NOTHING_OWN

    def as_json(self) -> dict[str, Any]:
        found = {name: value if (value := getattr(self, name)) < math.inf else None for name in LIMITS}
        return found | {name: of.as_json() for name in RESOURCES[1:] if (of := getattr(self, name))}


NOTHING_OWN = Quota(0.0)  # and may borrow


@dataclass(frozen=True)
class Limits:
    """Quotas of T tenants in whole numbers: thousandths of GPUs and cores, MiB.

    Args:
        resources: those of RESOURCES that have quotas, R of them.
        nominal: what is each tenant's own, [T, R].
        reserved: what it does not lend, [T, R].
        limit: what it may hold with what it may borrow, [T, R].
        pool: what all lend together, [R].
        quotas: of each, [T].
    """

    resources: tuple[str, ...]
    nominal: NDArray[np.int64]
    reserved: NDArray[np.int64]
    limit: NDArray[np.int64]
    pool: NDArray[np.int64]
    quotas: Sequence[Quota]

    @classmethod
    def of(cls, quotas: Mapping[str, Quota], jobs: Jobs) -> "Limits":
        """For the tenants of ``jobs``. Without quotas there are no limits. A tenant that is not named has the quota of
        ``*``, or a nominal one of 0 and may borrow.

        Raises:
            UnknownName: a quota of a tenant that the trace does not name.
        """
        _known(quotas, jobs, OTHERS)
        return cls.of_tenants(quotas, jobs.tenants)

    @classmethod
    def of_tenants(cls, quotas: Mapping[str, Quota], tenants: Sequence[str]) -> "Limits":
        """The same for tenants by name."""
        stated = [name for name in RESOURCES[1:] if any(getattr(quota, name) for quota in quotas.values())]
        resources = (RESOURCES[0], *stated) if quotas else ()
        each = [quotas.get(name, quotas.get(OTHERS, NOTHING_OWN)) for name in tenants]
        shape = len(each), len(resources)
        nominal, borrowed, lent = np.zeros((3, *shape), np.int64)
        for r, resource in enumerate(resources):
            unit, of = UNITS[resource], [quota.of(resource) for quota in each]
            nominal[:, r] = [round(quota.nominal * unit) for quota in of]
            total = int(nominal[:, r].sum())
            lent[:, r] = [round(min(quota.lending_limit, quota.nominal) * unit) for quota in of]
            borrowed[:, r] = [round(min(quota.borrowing_limit * unit, total)) for quota in of]
        reserved, pool = nominal - lent, lent.sum(axis=0)
        return cls(resources, nominal, reserved, np.minimum(nominal + borrowed, reserved + pool), pool, each)

    def requested(self, jobs: Jobs) -> NDArray[np.int64]:
        """What each job requests of the resources, [J, R]."""
        columns = {"gpus": jobs.gpus * jobs.milli, "cpu": jobs.cpu, "memory_gb": jobs.memory}
        rows = [columns[name] for name in self.resources]
        return np.stack(rows, axis=1) if rows else np.zeros((len(jobs), 0), np.int64)

    def never_admitted(self, jobs: Jobs) -> dict[int, str]:
        """The jobs that can never be admitted, and why."""
        requested = self.requested(jobs)
        over = np.flatnonzero((requested > self.limit[jobs.tenant]).any(axis=1))
        return {
            j: self.why_never_admitted(jobs.tenant[j], jobs.tenants[jobs.tenant[j]], requested[j])
            for j in over.tolist()
        }

    def why_never_admitted(self, tenant: int, name: str, requested: Sequence[int] | NDArray[np.int64]) -> str:
        """Why a job of a tenant, with its name, that requests so much of each resource is never admitted; empty where it
        is."""
        over = np.flatnonzero(requested > self.limit[tenant])
        if not len(over):
            return ""
        r = int(over[0])
        resource, quota = self.resources[r], self.quotas[tenant].of(self.resources[r])
        unit, most = UNITS[resource], int(self.reserved[tenant, r] + self.pool[r])
        amount = float(requested[r]) / unit
        what = {"gpus": count(amount, "GPU"), "cpu": count(amount, "core"), "memory_gb": f"{amount:g} GB of memory"}
        needs = f"it needs {what[resource]}, and"
        if requested[r] > most:
            if most < self.nominal[:, r].sum():
                return f"{needs} tenant '{name}' never has more than {most / unit:g}, with all that others lend"
            return f"{needs} the quotas of all tenants together are {most / unit:g}"
        may = f" and it may borrow {quota.borrowing_limit:g}" if quota.borrowing_limit else ""
        return f"{needs} the quota of tenant '{name}' is {quota.nominal:g}{may}"


def weights_of(weights: Mapping[str, float], jobs: Jobs) -> NDArray[np.float64]:
    """The weight of each of the trace's tenants, [T]; 1 of those that are not named.

    Raises:
        UnknownName: a tenant that the trace does not name.
    """
    _known(weights, jobs)
    return np.array([weights.get(name, 1.0) for name in jobs.tenants], np.float64)


def parse_weights(text: str) -> dict[str, float]:
    """``team-a=2,team-b=1``.

    Raises:
        ValueError: something else.
    """
    found: dict[str, float] = {}
    for name, value in _pairs(text, "weights", "team-a=2,team-b=1").items():
        found[name] = _number(value, f"the weight of tenant '{name}'", "a number above 0")
        if not 0 < found[name] < math.inf:
            raise ValueError(f"the weight of tenant '{name}' is {value}; expected a number above 0")
    return found


def parse(text: str) -> dict[str, Quota]:
    """``team-a=32,team-b=16:8:4``: nominal GPUs, after a colon how many more may be borrowed, after another how many may
    be lent; ``16::4``: all may be borrowed.

    Raises:
        ValueError: something else.
    """
    found: dict[str, Quota] = {}
    for name, value in _pairs(text, "quota", EXAMPLE).items():
        nominal, *limits = value.split(":", maxsplit=len(LIMITS) - 1)
        form = f"the quota of tenant '{name}'", "GPUs, or GPUs:BORROWED:LENT, such as 16:8:4"
        numbers = [
            math.inf if not part and i + 1 < len(limits) else _number(part, *form) for i, part in enumerate(limits)
        ]
        try:
            borrowed, lent = (*numbers, math.inf, math.inf)[:2]
            found[name] = Quota(_number(nominal, *form), borrowed, lent)
        except ValueError as error:
            raise ValueError(f"tenant '{name}': {error}") from None
    return found


def load(path: Path) -> dict[str, Quota]:
    """A YAML file: a list under ``quotas`` of ``tenant``, ``nominal`` and, if not all may be borrowed or lent,
    ``borrowing_limit`` and ``lending_limit``; ``cpu`` and ``memory_gb`` with the same three keys, or with a number. Or a
    cluster file with teams: a team's GPUs in all pools together,
        in one cohort; without a cohort it neither borrows nor lends.

    Raises:
        TraceError: no YAML, an unknown key, a value of another kind, a tenant that is there twice; with the line.
        ImportError: PyYAML is missing.
    """
    top = root(path, "a list of tenants under 'quotas:'")
    if top.id == "mapping" and any(key.value in ("nodes", "teams") for key, _ in top.value):
        return _of_teams(path)
    listed = entries(path, "quotas", "a list of tenants")
    if not listed:
        raise TraceError(f"{path}: quotas is empty; expected a list of tenants")
    found: dict[str, Quota] = {}
    for node in listed:
        name, quota = _entry(path, node)
        if name in found:
            raise TraceError(f"{path}:{line(node)}: tenant '{name}' already exists; expected it once")
        found[name] = quota
    return found


def given(text: str) -> dict[str, Quota]:
    """What a command line gives: a text as of :func:`parse`, or a file of :func:`load`."""
    if "=" in text and not Path(text).exists():
        return parse(text)
    if not Path(text).exists():
        raise ValueError(
            f"quota '{text}' is no file; expected one, or TENANT=GPUS[:BORROWED[:LENT]],…, such as {EXAMPLE}"
        )
    return load(Path(text))


# ---- reading ---------------------------------------------------------------------------------------------------------


def _known(names: Mapping[str, Any], jobs: Jobs, *more: str) -> None:
    for name in names:
        if name not in jobs.tenants and name not in more:
            raise UnknownName("tenant", name, jobs.tenants)


def _pairs(text: str, what: str, example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.rpartition("="))
        if not equals or not name or not value:
            raise ValueError(f"{what} '{text}'; expected TENANT=…, such as {example}")
        if name in found:
            raise ValueError(f"{what} '{text}' names tenant '{name}' twice; expected it once")
        found[name] = value
    return found


def _number(text: str, what: str, expected: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{what} is '{text}'; expected {expected}") from None


def _of_teams(path: Path) -> dict[str, Quota]:
    from weft.cluster.specification import read

    made = read(path)
    if not made.teams:
        raise TraceError(f"{path}: it has no teams; expected teams with quotas, or a list under 'quotas:'")
    if len(roots := {made.root_of(team.cohort) for team in made.teams if team.cohort}) > 1:
        raise TraceError(
            f"{path}:{made.lines['cohorts']}: teams are in {len(roots)} trees of cohorts; the simulator has one"
        )
    found = {}
    for team in made.teams:
        nominal = borrowed = lent = 0.0
        for quota in team.quota:
            share = made.pool(quota.pool).sharing.replicas
            nominal += quota.nominal / share
            borrowed += quota.borrowing_limit / share
            lent += min(quota.lending_limit, quota.nominal) / share
        found[team.name] = Quota(nominal, borrowed if team.cohort else 0, lent if team.cohort else 0)
    return found


def _entry(path: Path, node: Any) -> tuple[str, Quota]:
    values = mapping(path, node, KEYS, "a quota")
    for key in ("tenant", "nominal"):
        if key not in values:
            raise TraceError(f"{path}:{line(node)}: {key} is missing")
    if values["tenant"].id != "scalar" or not values["tenant"].value:
        raise TraceError(f"{path}:{line(values['tenant'])}: tenant is no name; expected a word")
    more: dict[str, Any] = {}
    for key in RESOURCES[1:]:
        if key in values:
            node = values[key]
            parts = mapping(path, node, LIMITS, f"a quota of {key}") if node.id == "mapping" else {"nominal": node}
            if "nominal" not in parts:
                raise TraceError(f"{path}:{line(node)}: nominal is missing")
            more[key] = _limits(path, parts, key)
    return values["tenant"].value, replace(_limits(path, values, "GPUs"), **more)


def _limits(path: Path, values: Mapping[str, Any], of: str) -> Quota:
    of = {"cpu": "cores", "memory_gb": "GB"}.get(of, of)
    numbers: dict[str, Any] = {}
    for key in LIMITS:
        if key in values:
            value = values[key]
            text = value.value if value.id == "scalar" else f"a {value.id}"
            try:
                numbers[key] = float(text)
            except ValueError:
                raise TraceError(f"{path}:{line(value)}: {key} is {text!r}; expected {of}, 0 or more") from None
            if not 0 <= numbers[key] < MOST:
                raise TraceError(f"{path}:{line(value)}: {key} is {text!r}; expected {of}, 0 or more")
    try:
        return Quota(**numbers)
    except ValueError as error:
        raise TraceError(f"{path}:{line(values['lending_limit'])}: {error}") from None
