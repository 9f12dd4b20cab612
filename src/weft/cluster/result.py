"""The result of a simulation: when every job ran and where, and what it waited for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import WHOLE, Cluster, Jobs
from weft.cluster.quota import Quota
from weft.words import count

# What a waiting job waits for: the first of these that holds for it alone.
REASONS = {
    "priority": "it would fit, but jobs before it in the queue block it",
    "quota": "its tenant's quota, or the quotas of all tenants together, do not admit it now",
    "capacity": "fewer GPUs are free in the whole cluster than it requests",
    "type": "fewer are free of a type that it accepts",
    "memory": "fewer are free with as much memory",
    "gang": "enough are free, but not on enough nodes at once",
    "topology": "enough are free, on enough nodes, but not within one rack",
    "host": "enough are free on a node, but not enough cores or main memory",
    "fragmentation": "enough are free, but not on any one node",
}


@dataclass
class Stretches:
    """When jobs held their nodes, columns of length S. A job that was stopped has several, in order of time.

    Args:
        job: of each stretch.
        begin, end: seconds; NaN of a job that never started.
        slot: [S + 1]; the nodes of stretch s are ``where[slot[s]:slot[s + 1]]``, and
        where: node numbers.
        on: beside ``where`` a bit for each GPU that is taken of the node; empty where the placement does not choose
        GPUs.
    """

    job: NDArray[np.int64]
    begin: NDArray[np.float64]
    end: NDArray[np.float64]
    slot: NDArray[np.int64]
    where: NDArray[np.int32]
    on: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.job)


@dataclass
class Result:
    """The result of a simulation.

    Args:
        start: seconds at which each job started first, [J]; NaN for one that never did.
        end: seconds, [J]; NaN for a job that did not run to its end.
        stretches: when jobs held which nodes; without preemption one a job, in the order of jobs.
        waited: seconds that each job waited for each of REASONS, [J, 9]; together its wait.
        stops: how often each job was stopped, [J], and
        lost: seconds that it held its GPUs without getting on, for that, [J].
        unschedulable: for jobs that can never run, the nearest node and what it lacks.
        cpu_s: CPU seconds of the engine, compiling apart.
        restart_s, checkpoint_s: what a preemption cost (:func:`weft.cluster.simulate`).
        complete: False when it was interrupted.
        weights, quotas: of tenants, as they were given.
        warm_up_s: jobs that are submitted in the first so many seconds count in no metric of jobs.
    """

    jobs: Jobs
    cluster: Cluster
    order: str
    placement: str
    ties: str
    seed: int
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    stretches: Stretches
    waited: NDArray[np.float64]
    stops: NDArray[np.int64]
    lost: NDArray[np.float64]
    unschedulable: dict[int, str]
    cpu_s: float
    restart_s: float = 0.0
    checkpoint_s: float = 0.0
    complete: bool = True
    weights: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    warm_up_s: float = 0.0

    def __repr__(self) -> str:
        interrupted = "" if self.complete else ", interrupted"
        return (
            f"<Result: {self.order}, {self.placement} (ties: {self.ties}), {self.ran.sum():,} of "
            f"{count(len(self.jobs), 'job')} ran on {count(len(self.cluster), 'node')}, "
            f"{count(self.cluster.total_gpus, 'GPU')}{interrupted}>"
        )

    @property
    def ran(self) -> NDArray[np.bool_]:
        """Which jobs ran to their end, [J]; of an interrupted run also those that were running."""
        return ~np.isnan(self.end)

    @property
    def warm_up(self) -> NDArray[np.bool_]:
        """Which jobs were submitted in the warm-up, [J]."""
        submit = self.jobs.submit
        return submit < submit.min(initial=np.inf) + self.warm_up_s

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which jobs ran and count in metrics, [J]: those submitted after the warm-up."""
        return self.ran & ~self.warm_up

    @property
    def stopped(self) -> NDArray[np.bool_]:
        """Which stretches ended because the job was stopped, [S]."""
        s = self.stretches
        goes_on = np.append(s.job[1:] == s.job[:-1], np.zeros(min(len(s), 1), bool))
        return goes_on | (np.isnan(self.end[s.job]) & ~np.isnan(s.end))

    @property
    def queueing(self) -> NDArray[np.float64]:
        """Seconds that each job waited, before its start and after it was stopped, [J]; NaN where it did not run."""
        waited: NDArray[np.float64] = self.start - self.jobs.submit
        stopped = self.stops > 0
        if stopped.any():
            held = np.bincount(self.stretches.job, self.stretches.end - self.stretches.begin, minlength=len(self.jobs))
            waited[stopped] = np.maximum(self.end - self.jobs.submit - held, 0.0)[stopped]
        waited[~self.ran] = np.nan
        return waited

    @property
    def gpus(self) -> NDArray[np.float64]:
        """GPUs of each job, shares counted as such, [J]."""
        return self.jobs.gpus * self.jobs.milli / WHOLE
