"""What an order is: how a queue is sorted, and whether it preempts. Orders are found in ``weft.cluster.orders``.

What theory says of them: docs/notes/learn/scheduling.en.md.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import Jobs

# How the key of a running job changes with time: only when its level does; it falls by 1 a second; in any way.
FIXED, FALLING, FREE = range(3)
RUNNING_FIRST = 2.0**41  # sequence numbers of running jobs are lower by so much than those of waiting jobs
KNOWN = 7  # where what `context` returned begins in `known`
LEAST_S = 1e-3  # the shortest reservation of conservative backfill


def no_context(jobs: Jobs) -> NDArray[np.float64]:
    return np.zeros(0)


@dataclass(frozen=True)
class Preemption:
    """Of an order that may preempt a running job for one that comes before it.

    Args:
        key: ``(job, remaining, served) -> float``, or with a fourth argument, ``known``; small values first, equal ones by
            submission. ``remaining``: seconds until it would end by its estimate, were it to run on; ``served``: seconds that
            it has held its GPUs; ``job`` has ``submit``, ``estimate``, ``gpus``, ``priority``, ``level`` and ``sequence``. It
            must not change while a job waits. Numba compiles it.
        drift: FIXED, FALLING or FREE, of the key of a running job.
        levels: attained service at which a job is demoted to the next level, rising; seconds, or with
        by_gpus: GPU seconds.
        equals: whether of two jobs with equal keys the one submitted first preempts the other.
        context: ``(jobs) -> numbers``, what the key knows of the trace, or of the history that is given: ``known[KNOWN:]``.

    ``sequence`` orders the jobs of a level as Tiresias does: first the running ones, from when they started; then the
    preempted ones, the last preempted first; then the waiting ones, and those just demoted to it, from when they came.
    """

    key: Callable[..., float]
    drift: int
    levels: tuple[float, ...] = ()
    by_gpus: bool = False
    equals: bool = False
    context: Callable[[Jobs], NDArray[np.float64]] = no_context


@dataclass(frozen=True)
class Rounds:
    """Of an order that decides in plain Python (:mod:`weft.cluster.reference.rounds`).

    Args:
        decide: ``(view) -> jobs``: which jobs should hold GPUs, the most important first.
        every_s: seconds between rounds; 0 for a round at every arrival and completion.
        quotas: whether it uses the quotas of tenants; it then needs them.
    """

    decide: Callable[[Any], Iterable[Any]]
    every_s: float = 0.0
    quotas: bool = False

    def __post_init__(self) -> None:
        if self.every_s and not (isinstance(self.every_s, (int, float)) and 1e-3 <= self.every_s < math.inf):
            raise ValueError(f"rounds every {self.every_s!r} s; expected 0, or seconds from 0.001 on")


# The end of an order's name → which jobs may start.
MODES = {
    "": "strict: the head of the queue blocks all others",
    "-skip": "any job that fits may start",
    "-easy": "a job that does not delay the head, by its estimate, may start (EASY backfill)",
    "-conservative": "a job that delays no job before it, by its estimate, may start (conservative backfill)",
}


@dataclass(frozen=True)
class Order:
    """A queue's order.

    Args:
        name: what users call it. ``NAME-skip`` is the same order in which any job that fits may start.
        keys: ``(jobs) -> columns``, the first one most important, small values first; equal ones by submission.
        meaning: one line.
        validated: the end of the name (one of MODES) → the published figures that were reproduced.
        preemption: how it preempts, if it does; it then has no modes, and ``keys`` only order events of one time.
        share: ``(tenant, cluster) -> float``, of an order among tenants: the tenant with the least comes first, of equal ones
            the one whose first job does; ``keys`` order the jobs of one tenant. Both have ``gpus`` and ``cpu`` (thousandths)
            and ``memory`` (MiB): what the tenant's jobs hold, and all that the cluster has, 0 where some node's is unknown.
            The tenant has a ``weight``. Numba compiles it.
        rounds: how it decides, if it is a policy in plain Python; it may preempt, and has no modes.
    """

    name: str
    keys: Callable[[Jobs], tuple[NDArray[Any], ...]]
    meaning: str
    validated: Mapping[str, str] = field(default_factory=dict)
    preemption: Preemption | None = None
    share: Callable[..., float] | None = None
    rounds: Rounds | None = None

    @property
    def preemptive(self) -> bool:
        return bool(self.preemption or self.rounds)

    @property
    def modes(self) -> tuple[str, ...]:
        """Those of MODES that it has."""
        return ("",) if self.preemptive else ("", "-skip") if self.share else tuple(MODES)

    def rank(self, jobs: Jobs) -> NDArray[np.int32]:
        """Each job's position, [J]; jobs are in order of submission, which breaks ties."""
        keys = self.columns(jobs)
        rank = np.empty(len(jobs), np.int32)
        order = np.lexsort(keys[::-1]) if keys else np.arange(len(jobs))
        rank[order] = np.arange(len(jobs), dtype=np.int32)
        return rank

    def columns(self, jobs: Jobs) -> tuple[NDArray[Any], ...]:
        """What ``keys`` returns for jobs, which it cannot write to.

        Raises:
            ValueError: it raises, or returns no columns of numbers; with the first job for which it does.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
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
