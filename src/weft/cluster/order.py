"""What an order is, and how they are found: every module of ``weft.cluster.orders`` that has an ``ORDER``."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.file import missing
from weft.cluster.model import Jobs
from weft.definition import UnknownName

# How the key of a running job changes with time: not at all but at levels; it falls by 1 a second; in any way.
FIXED, FALLING, FREE = range(3)
SETTLED = 2.0**41  # turns of jobs that run come before those of jobs that wait by so much
KNOWN = 7  # where what `context` gave begins in `known`


def nothing_known(jobs: Jobs) -> NDArray[np.float64]:
    return np.zeros(0)


@dataclass(frozen=True)
class Preemption:
    """Of an order that may stop a running job for one that comes before it.

    Args:
        key: ``(job, left, served) -> float``, or with a fourth one, ``known``; small values first, equal ones by submission.
            ``left``: seconds until it would end by its estimate, were it to run on; ``served``: seconds that it has held its
            GPUs; ``job`` has ``submit``, ``estimate``, ``gpus``, ``priority``, ``level`` and ``turn``. It must not change while
            a job waits. Numba compiles it.
        drift: FIXED, FALLING or FREE, of the key of a job that runs.
        levels: service at which a job falls to the next level, rising; seconds, or with
        by_gpus: GPU seconds.
        equals: whether of equal keys who was submitted first stops the other.
        context: ``(jobs) -> numbers``, what the key knows of the trace, or of the history that is given: ``known[KNOWN:]``.

    ``turn`` orders the jobs of a level as Tiresias does: first those that run, from when they started; then those that were
    stopped, the last stopped first; then those that wait, and those that have just come down to it, from when they came.
    """

    key: Callable[..., float]
    drift: int
    levels: tuple[float, ...] = ()
    by_gpus: bool = False
    equals: bool = False
    context: Callable[[Jobs], NDArray[np.float64]] = nothing_known


@dataclass(frozen=True)
class Rounds:
    """Of an order that decides in plain Python (:mod:`weft.cluster.rounds`).

    Args:
        decide: ``(view) -> jobs``: who should hold GPUs, the most important first.
        every_s: seconds between rounds; 0 for a round at every arrival and completion.
        quotas: whether it heeds the quotas of tenants; it then needs them.
    """

    decide: Callable[[Any], Iterable[Any]]
    every_s: float = 0.0
    quotas: bool = False

    def __post_init__(self) -> None:
        if self.every_s and not (isinstance(self.every_s, (int, float)) and 1e-3 <= self.every_s < math.inf):
            raise ValueError(f"rounds every {self.every_s!r} s; expected 0, or seconds from 0.001 on")


@dataclass(frozen=True)
class Order:
    """A queue's order.

    Args:
        name: what users call it. ``NAME-skip`` is the same order with everyone who fits passing those who do not.
        keys: ``(jobs) -> columns``, the first one most important, small values first; equal ones by submission.
        meaning: one line.
        validated: the end of the name (one of MODES) → the published figures that were reproduced.
        preemption: how it stops jobs, if it does; it then has no modes, and ``keys`` only order what happens at one moment.
        share: ``(tenant, cluster) -> float``, of an order among tenants: the tenant with the least comes first, of equal ones
            that whose first job does; ``keys`` order the jobs of one tenant. Both have ``gpus`` and ``cpu`` (thousandths) and
            ``memory`` (MiB): what the tenant's jobs hold, and all that the cluster has, 0 where that is not known of every
            node. The tenant has a ``weight``. Numba compiles it.
        rounds: how it decides, if it is a policy in plain Python; it may stop jobs, and has no modes.
    """

    name: str
    keys: Callable[[Jobs], tuple[NDArray[Any], ...]]
    meaning: str
    validated: Mapping[str, str] = field(default_factory=dict)
    preemption: Preemption | None = None
    share: Callable[..., float] | None = None
    rounds: Rounds | None = None

    @property
    def stops_jobs(self) -> bool:
        return bool(self.preemption or self.rounds)

    @property
    def modes(self) -> tuple[str, ...]:
        """Those of MODES that it has."""
        return ("",) if self.stops_jobs else ("", "-skip") if self.share else tuple(MODES)

    def rank(self, jobs: Jobs) -> NDArray[np.int32]:
        """Each job's position, [J]; jobs are in order of submission, which settles what the keys leave equal."""
        keys = self.columns(jobs)
        rank = np.empty(len(jobs), np.int32)
        order = np.lexsort(keys[::-1]) if keys else np.arange(len(jobs))
        rank[order] = np.arange(len(jobs), dtype=np.int32)
        return rank

    def columns(self, jobs: Jobs) -> tuple[NDArray[Any], ...]:
        """What ``keys`` gives for jobs, which it cannot write to.

        Raises:
            ValueError: it raises, or gives what are no columns of numbers; with the first job for which it does.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is the result's
                found = tuple(np.asarray(column) for column in self.keys(jobs.read_only()))
            for column in found:
                if column.shape != (len(jobs),) or column.dtype.kind not in "biuf":
                    raise TypeError(f"a column of {column.dtype} {column.shape}; expected {len(jobs)} numbers")
                if len(bad := np.flatnonzero(np.isnan(column))):
                    j = int(bad[0])
                    raise ValueError(f"the key of job {jobs.id[j]!r}, submitted at {jobs.submit[j]:g} s, is nan")
        except (Exception, SystemExit) as error:
            if len(jobs) > 1:
                for half in np.array_split(np.arange(len(jobs)), 2):
                    self.columns(jobs.take(half))
            of = f" of job {jobs.id[0]!r}, submitted at {jobs.submit[0]:g} s" if len(jobs) == 1 else ""
            raise ValueError(f"order '{self.name}': keys{of}: {type(error).__name__}: {error}") from error
        return found


MODES = {
    "": "the head waits and nobody passes it",
    "-skip": "everyone who fits may pass",
    "-easy": "who does not delay the head, by its estimate, may pass (EASY backfill)",
    "-conservative": "who delays nobody before it, by its estimate, may pass (conservative backfill)",
}


def find(name: str) -> tuple[Order, str]:
    """The order, and who may pass: one of MODES, the end of the name.

    Args:
        name: of a module of ``weft.cluster.orders``, or the path of a file such as those, ``./mine.py``.

    Raises:
        UnknownName: there is none.
        ValueError: a mode of an order that has none; a file that has no order.
    """
    from weft.cluster.orders import ORDERS

    mode = next((end for end in MODES if end and name.endswith(end)), "")
    base = name.removesuffix(mode)
    if base.endswith(".py"):
        order = of_file(Path(base).resolve())
    elif base in ORDERS:
        order = ORDERS[base]
    else:
        raise UnknownName("order", name, [f"{o}{end}" for end in MODES for o in ORDERS if end in ORDERS[o].modes])
    if mode and order.stops_jobs:
        raise ValueError(f"order '{name}': {base} stops jobs, and whoever fits may pass; expected '{base}'")
    if mode not in order.modes:
        raise ValueError(
            f"order '{name}': who comes first among tenants changes with every start, and nobody can be promised a place; "
            f"expected '{base}' or '{base}-skip'"
        )
    return order, mode


@functools.cache
def of_file(path: Path) -> Order:
    """The ``ORDER`` of a file; read once."""
    if not path.is_file():
        raise FileNotFoundError(f"order: {missing(path)}")
    spec = importlib.util.spec_from_file_location(f"weft_order_{path.stem}", path)
    assert spec and spec.loader  # of every name that ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the result's
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"order '{path}': {type(error).__name__}: {error}") from error
    order = getattr(module, "ORDER", None)
    if not isinstance(order, Order):
        raise ValueError(f"order '{path}': ORDER is {order!r}; expected a weft.cluster.order.Order")
    if order.preemption or order.share:
        raise ValueError(
            f"order '{path}': what Numba compiles into the engine must lie in weft/cluster/orders; expected sort keys, or "
            "rounds, which may stop jobs too"
        )
    return order
