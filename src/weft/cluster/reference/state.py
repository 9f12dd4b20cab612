"""The state of a simulation that every scheduling rule works on: the clock, the jobs, the queue and the policy."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.cluster import policy
from weft.cluster.order import KNOWN
from weft.cluster.quota import NO_TENANTS, Quota
from weft.cluster.reference.model import Job, Node, Piece
from weft.cluster.reference.placing import Nodes


class State(Nodes):
    """Nodes, jobs and a queue. The rules change it; :class:`weft.cluster.reference.simulator.Simulator` calls the
    rules."""

    def __init__(
        self,
        order: str,
        placement: str,
        ties: str,
        seed: int,
        restart_s: float,
        checkpoint_s: float,
        weights: Mapping[str, float] = NO_TENANTS,
        quotas: Mapping[str, Quota] = NO_TENANTS,
    ):
        super().__init__(placement, ties, seed)
        self.order, self.mode = policy.find_order(order)
        policy.check_tenants(weights, quotas, self.order, self.mode)
        policy.check_topology(self.placement, self.order, self.mode)
        self.restart_s, self.checkpoint_s = restart_s, checkpoint_s
        self.weights, self.quotas = weights, quotas
        self.kept: dict[str, list[int]] = {}  # of the pool of quotas, for the waiting heads of tenants
        self.tenants: dict[str, None] = {}  # all tenants of the jobs so far
        self.known_to_order = np.zeros(KNOWN)
        self.last_sequence = self.first_sequence = 0  # sequence numbers given so far, for orders that preempt
        self.plan: dict[Any, list[tuple[Node, Piece, float, float]]] = {}  # of conservative backfill
        self.detailed = False  # whether single GPUs are tracked
        self.jobs: dict[Any, Job] = {}
        self.arriving: list[Job] = []  # not submitted yet
        self.queue: list[Job] = []
        self.history: list[tuple[float, str, Any]] = []

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == "running"]

    def start(self, job: Job, estimate: float) -> None:
        """Starts a job whose pieces are placed."""
        self.queue.remove(job)
        job.start, job.end, job.expected_end = self.now, self.now + job.duration, self.now + estimate
        self.record(job, "running")

    def record(self, job: Job, state: str) -> None:
        job.state = state
        self.history.append((self.now, state, job.id))
