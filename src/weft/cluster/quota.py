"""Quotas of GPUs with borrowing, as Kueue's ClusterQueues in one cohort, and weights of tenants.

A tenant may hold its *nominal* GPUs, and borrow up to its *borrowing limit* more. All tenants of the cohort together
never hold more than the sum of their nominal quotas: what one of them borrows, another does not use. Jobs within the
nominal quota come before jobs that borrow; otherwise the queue's order counts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.files.text import TraceError
from weft.cluster.files.yaml import entries, line, mapping
from weft.cluster.model import WHOLE, Jobs
from weft.definition import UnknownName
from weft.words import count

OTHERS = "*"  # names the quota of every tenant that is not named
KEYS = ("tenant", "nominal", "borrowing_limit")
NO_TENANTS: Mapping[str, Any] = MappingProxyType({})
UNLIMITED = 1 << 62
MOST = 1e12  # GPUs; thousandths of it are still whole numbers of 64 bits
EXAMPLE = "team-a=32,team-b=16:8"


@dataclass(frozen=True)
class Quota:
    """How many GPUs a tenant may hold.

    Args:
        nominal: GPUs that are its own.
        borrowing_limit: GPUs of others that it may hold as well while they are free; unlimited by default.

    Raises:
        ValueError: less than 0, or no number.
    """

    nominal: float
    borrowing_limit: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.nominal < MOST:
            raise ValueError(f"the nominal quota is {self.nominal}; expected GPUs, 0 or more")
        if not self.borrowing_limit >= 0:  # NaN neither
            raise ValueError(f"the borrowing limit is {self.borrowing_limit}; expected GPUs, 0 or more")

    def as_json(self) -> dict[str, float | None]:
        return {
            "nominal": self.nominal,
            "borrowing_limit": self.borrowing_limit if self.borrowing_limit < math.inf else None,
        }


@dataclass(frozen=True)
class Limits:
    """Quotas in thousandths of GPUs.

    Args:
        nominal: of each tenant, [T].
        limit: the same with what it may borrow, [T].
        cohort: of all tenants.
        quotas: of each, [T].
    """

    nominal: NDArray[np.int64]
    limit: NDArray[np.int64]
    cohort: int
    quotas: Sequence[Quota]

    @classmethod
    def of(cls, quotas: Mapping[str, Quota], jobs: Jobs) -> "Limits":
        """For the tenants of ``jobs``. Without quotas there are no limits. A tenant that is not named has the quota of
        ``*``, or a nominal one of 0 and may borrow.

        Raises:
            UnknownName: a quota of a tenant that the trace does not name.
        """
        if not quotas:
            without = np.full(len(jobs.tenants), UNLIMITED)
            return cls(without, without, UNLIMITED, ())
        _known(quotas, jobs, OTHERS)
        others = quotas.get(OTHERS, Quota(0.0))
        each = [quotas.get(name, others) for name in jobs.tenants]
        nominal = np.array([round(q.nominal * WHOLE) for q in each], np.int64)
        cohort = int(nominal.sum())
        borrowed = [round(min(q.borrowing_limit * WHOLE, cohort)) for q in each]
        return cls(nominal, np.minimum(nominal + np.array(borrowed, np.int64), cohort), cohort, each)

    def never_admitted(self, jobs: Jobs) -> dict[int, str]:
        """The jobs that can never be admitted, and why."""
        over = np.flatnonzero(jobs.gpus * jobs.milli > self.limit[jobs.tenant])
        return {
            j: why_never_admitted(
                jobs.tenants[jobs.tenant[j]],
                int(jobs.gpus[j] * jobs.milli[j]),
                self.quotas[jobs.tenant[j]],
                self.cohort,
            )
            for j in over.tolist()
        }


def why_never_admitted(tenant: str, requested: int, quota: Quota, cohort: int) -> str:
    """Why a job is never admitted: ``requested`` by it and the quotas of the whole ``cohort``, in thousandths of
    GPUs."""
    what = f"it needs {count(requested / WHOLE, 'GPU')}, and "
    if requested > cohort:
        return f"{what}the quotas of all tenants together are {cohort / WHOLE:g}"
    may = f" and it may borrow {quota.borrowing_limit:g}" if quota.borrowing_limit else ""
    return f"{what}the quota of tenant '{tenant}' is {quota.nominal:g}{may}"


def quota_of(quotas: Mapping[str, Quota], tenant: str) -> Quota:
    """A tenant that is not named has the quota of ``*``, or a nominal one of 0 and may borrow."""
    return quotas.get(tenant, quotas.get(OTHERS, Quota(0.0)))


def nominal_of(quotas: Mapping[str, Quota], tenant: str) -> int:
    """A tenant's own thousandths of GPUs."""
    return round(quota_of(quotas, tenant).nominal * WHOLE)


def limit_of(quotas: Mapping[str, Quota], tenant: str) -> float:
    """Thousandths of GPUs that a tenant may hold, with what it may borrow."""
    borrowed = quota_of(quotas, tenant).borrowing_limit * WHOLE
    return nominal_of(quotas, tenant) + (round(borrowed) if borrowed < math.inf else borrowed)


def cohort_of(quotas: Mapping[str, Quota], tenants: Iterable[str]) -> int:
    """Thousandths of GPUs that all tenants together may hold: the sum of their nominal quotas."""
    names = {*tenants} | ({*quotas} - {OTHERS})
    return sum(nominal_of(quotas, name) for name in names)


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
    """``team-a=32,team-b=16:8``: nominal GPUs, and after a colon how many more may be borrowed.

    Raises:
        ValueError: something else.
    """
    found: dict[str, Quota] = {}
    for name, value in _pairs(text, "quota", EXAMPLE).items():
        nominal, colon, limit = value.partition(":")
        numbers = [_number(part, f"the quota of tenant '{name}'", "GPUs, or GPUs:BORROWED, such as 16:8")
                   for part in ([nominal, limit] if colon else [nominal])]  # fmt: skip
        try:
            found[name] = Quota(*numbers)
        except ValueError as error:
            raise ValueError(f"tenant '{name}': {error}") from None
    return found


def load(path: Path) -> dict[str, Quota]:
    """A YAML file: a list under ``quotas`` of ``tenant``, ``nominal`` and, if not all may be borrowed,
    ``borrowing_limit``.

    Raises:
        TraceError: no YAML, an unknown key, a value of another kind, a tenant that is there twice; with the line.
        ImportError: PyYAML is missing.
    """
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
        raise ValueError(f"quota '{text}' is no file; expected one, or TENANT=GPUS[:BORROWED],…, such as {EXAMPLE}")
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


def _entry(path: Path, node: Any) -> tuple[str, Quota]:
    values = mapping(path, node, KEYS, "a quota")
    for key in ("tenant", "nominal"):
        if key not in values:
            raise TraceError(f"{path}:{line(node)}: {key} is missing")
    if values["tenant"].id != "scalar" or not values["tenant"].value:
        raise TraceError(f"{path}:{line(values['tenant'])}: tenant is no name; expected a word")
    numbers = {}
    for key in KEYS[1:]:
        if key in values:
            value = values[key]
            text = value.value if value.id == "scalar" else f"a {value.id}"
            try:
                numbers[key] = float(text)
            except ValueError:
                raise TraceError(f"{path}:{line(value)}: {key} is {text!r}; expected GPUs, 0 or more") from None
            if not 0 <= numbers[key] < MOST:
                raise TraceError(f"{path}:{line(value)}: {key} is {text!r}; expected GPUs, 0 or more")
    return values["tenant"].value, Quota(**numbers)
