"""The reference simulator's clock: what happens at each time, which rule decides, and what a waiting job waits for."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from weft.cluster.model import WHOLE, Cluster, Jobs
from weft.cluster.order import KNOWN
from weft.cluster.placement import REQUIRED
from weft.cluster.policy import find_placement
from weft.cluster.quota import NO_TENANTS, Quota
from weft.cluster.reference import backfill, preemption, rounds, tenants
from weft.cluster.reference.model import Job, Node, Piece
from weft.cluster.reference.state import State
from weft.cluster.unschedulable import why_unschedulable


class Simulator(State):
    """A cluster, a queue and a clock. At one time jobs complete, then jobs arrive, then jobs start.

    Args:
        order: ``fifo``, ``sjf`` …: the head of the queue blocks all others; with ``-skip`` any job that fits may start; with
            ``-easy`` and ``-conservative`` jobs are backfilled.
        placement: ``best``, ``first``, ``worst`` …: which of the fitting nodes.
        ties: ``lowest`` or ``highest`` of equally good nodes, or ``random``; the placement's own rule by default.
        seed: of random ties.
        restart_s, checkpoint_s: of an order that preempts, and
        weights, quotas: of tenants, all as for :func:`weft.cluster.simulate`.

    Raises:
        ValueError: an unknown order, placement or rule.
    """

    def __init__(
        self,
        order: str = "fifo",
        placement: str = "best",
        ties: str = "",
        seed: int = 0,
        restart_s: float = 0.0,
        checkpoint_s: float = 0.0,
        weights: Mapping[str, float] = NO_TENANTS,
        quotas: Mapping[str, Quota] = NO_TENANTS,
    ):
        super().__init__(order, placement, ties, seed, restart_s, checkpoint_s, weights, quotas)
        self.learned = False  # whether placement and order know the trace
        self.reservation: backfill.Reservation | None = None  # of the head of the queue, under EASY backfill
        self.beyond_shadow_time = False  # whether the job that is being placed runs beyond the shadow time

    # ---- building ----------------------------------------------------------------------------------------------------

    def add_job(
        self,
        id: Any,
        gpus: int,
        memory_per_gpu_gb: float = 0.0,
        duration: float = 1.0,
        submit: float | None = None,
        share: float = 1.0,
        tenant: str = "",
        cpu: float = 0.0,
        memory_gb: float = 0.0,
        priority: float = 0.0,
        estimate: float | None = None,
        types: Iterable[str] = (),
        pods: int = 0,
    ) -> None:
        """A job that is submitted now, or at ``submit`` seconds; ``share``: it takes so much of each of its GPUs; cores
        and main memory are the whole job's; ``estimate``: seconds that its user requested, the duration by default;
        ``types``: of GPUs that it accepts, any when empty; ``pods``: so many equal parts, each on one node.

        Raises:
            ValueError: an id that is taken, a time that is past, numbers below 0, or a job that fits on no empty node: which
                node comes nearest, and what it lacks.
        """
        if submit is not None and submit < self.now:
            raise ValueError(f"job '{id}' is submitted at {submit:g} s, and it is {self.now:g} s already")
        at = self.now if submit is None else submit
        row = Jobs(
            np.array([at]),
            np.array([duration]),
            np.array([gpus]),
            id=[id],
            gpu_memory=np.array([memory_per_gpu_gb]),
            milli=np.array([round(share * WHOLE)]),
            cpu=np.array([round(cpu * WHOLE)]),
            memory=np.array([round(memory_gb * 1024)]),
            tenants=(tenant,),
            priority=np.array([priority]),
            estimate=np.array([duration if estimate is None else estimate]),
            pods=np.array([pods]),
            types=np.array([0]),
            type_sets=(tuple(types),),
        )
        if reason := self.add(row):
            raise ValueError(f"job '{id}' can never run: {reason}")

    def add(self, row: Jobs) -> str:
        """Adds one row of a trace; a job that can never run is left out, and the reason returned."""
        id = row.id[0]
        if id in self.jobs:
            raise ValueError(f"job '{id}' already exists; expected another id for each job")
        self.detailed = self.detailed or bool(row.milli[0] < WHOLE)
        key = (*(column[0].item() for column in self.order.columns(row)), row.submit[0].item(), len(self.jobs))
        job = Job(id, row.submit[0].item(), row.duration[0].item(), row.read_only(), key, number=len(self.jobs))
        job.work, job.remaining = job.duration, job.estimate
        nodes, state = self.nodes, self.random
        self.nodes = [dataclasses.replace(node) for node in nodes]  # an empty cluster, only to try
        able = self.place(job)
        self.nodes, self.random = nodes, state
        job.placed = []
        if not able:
            return why_unschedulable(row, 0, self.cluster(), self.placement.topology == REQUIRED)
        self.tenants |= dict.fromkeys(row.tenants)
        if reason := tenants.never_admitted(self, job):
            return reason
        self.jobs[id] = job
        self.arriving.append(job)
        self.arriving.sort(key=lambda j: j.submit)  # stable: jobs of one time stay in the order they were added
        return ""

    def learn(self, jobs: Jobs, cluster: Cluster) -> None:
        """What the placement and the order know of the whole trace."""
        self.learned, self.context = True, self.placement.context(jobs, cluster)
        self.detailed = self.placement.detailed or bool((jobs.milli < WHOLE).any())
        if self.order.preemption:
            self.known_to_order = np.concatenate([np.zeros(KNOWN), self.order.preemption.context(jobs)])

    def known(self) -> Jobs:
        """All jobs so far, as columns."""
        rows = [job.row for job in self.jobs.values()]
        if not rows:
            return Jobs(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
        columns: dict[str, Any] = {n: np.concatenate([getattr(row, n) for row in rows]) for n in Jobs.columns()}
        sets = tuple(dict.fromkeys(accepted for row in rows for accepted in row.type_sets))
        columns["types"] = np.array([sets.index(row.type_sets[int(row.types[0])]) for row in rows])
        return Jobs(**columns, type_sets=sets, id=[row.id[0] for row in rows])

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self) -> "Simulator":
        """Steps until nothing is left to happen."""
        while self.step():
            pass
        return self

    def step(self) -> list[tuple[float, str, Any]]:
        """Goes to the next time at which something happens, and returns what happened: (seconds, what, job).

        Nothing is left to happen when the list is empty.
        """
        if not self.learned and self.jobs:
            self.learn(self.known(), self.cluster())
        time = self.next_event()
        if time == math.inf:
            return []
        running = self.running
        for job in self.queue:
            job.waited[job.reason] = job.waited.get(job.reason, 0.0) + time - self.now
        self.now, before = time, len(self.history)
        ended = [j for j in running if j.end == self.now]
        demoted = [j for j in running if j.demotion == self.now and j not in ended]
        for job in demoted:
            preemption.demote(self, job)
        for job in ended:
            job.release()
            job.lost += job.restart
            self.record(job, "completed")
        arrived = [job for job in self.arriving if job.submit == self.now]
        for job in arrived:
            self.arriving.remove(job)
            self.queue.append(job)
            if self.order.preemption:
                preemption.arrive(self, job)
            self.record(job, "pending")
        self.queue.sort(key=lambda j: j.key)
        if self.order.rounds:
            rounds.decide(self)
        elif self.order.preemption:
            preemption.start_waiting(self, demoted)
        elif self.mode == "-conservative":
            backfill.start_as_planned(self, ended, arrived)
        elif self.order.share or self.quotas:
            tenants.start_by_share(self)
        else:
            self.start_in_order(ended)
        for job in self.queue:
            job.reason = self.why_waiting(job)
        return self.history[before:]

    def next_event(self) -> float:
        """When a job completes, arrives or is demoted, or a round is due; inf when nothing is left to happen."""
        times = [min(j.end, j.demotion) for j in self.running if j.end is not None]
        if self.order.rounds and (times or self.queue):
            times.append(rounds.next_round(self.now, self.order.rounds.every_s))
        return min([job.submit for job in self.arriving[:1]] + times, default=math.inf)

    def start_in_order(self, ended: list[Job]) -> None:
        """Strict: the head blocks all others. Skip: any job that fits starts. EASY: any job that fits and does not
        delay the head, whose reservation holds until something is freed or another job is the head."""
        if self.reservation and (ended or self.queue[0] is not self.reservation.job):
            self.reservation = None
        for job in list(self.queue):
            shadow_time = self.reservation.shadow_time if self.reservation else math.inf
            self.beyond_shadow_time = job.estimate > shadow_time - self.now
            if self.place(job):
                self.start(job, job.estimate)
            elif not self.mode:
                break
            elif self.mode == "-easy" and self.reservation is None:
                self.reservation = backfill.reserve(self, job)
        self.beyond_shadow_time = False

    def able(self, node: Node, piece: Piece) -> bool:
        """Whether the node takes the piece now, without delaying a reservation."""
        delays = (
            self.reservation
            and self.beyond_shadow_time
            and not backfill.keeps_reservation(self, self.reservation, node, piece)
        )
        return not delays and super().able(node, piece)

    def why_waiting(self, job: Job) -> str:
        """What a waiting job would lack if it were alone in the queue: the first of ``result.REASONS`` that holds."""
        if tenants.waits_for_quota(self, job):
            return "quota"
        random = self.random
        if sum(sum(n.milli) for n in self.nodes) < job.milli_gpus:
            return "capacity"
        if self.place(job):
            job.release()
            job.placed, self.random = [], random
            return "priority"
        pieces = self.pieces(job.row)
        of_type = [n for n in self.nodes if pieces[0].types >> n.gpu_type & 1]
        of_memory = [n for n in of_type if n.gpu_memory < 0 or n.gpu_memory >= pieces[0].gpu_memory]
        for reason, nodes in (("type", of_type), ("memory", of_memory)):
            if sum(sum(n.milli) for n in nodes) < job.milli_gpus:
                return reason
        if len(pieces) > 1:
            required = self.placement.topology == REQUIRED
            return "topology" if required and self.takes(job, self.nodes, pieces) == len(pieces) else "gang"
        bare = dataclasses.replace(pieces[0], cpu=0, memory=0)
        return "host" if any(n.fits(bare) for n in of_memory) else "fragmentation"

    def status(self) -> dict[str, Any]:
        """The clock, the job (or None) on every GPU of every node, the state of every job, and the history."""
        return {
            "now": self.now,
            "nodes": {n.id: n.occupants() for n in self.nodes},
            "jobs": {
                j.id: {
                    "state": j.state,
                    "start": j.start,
                    "end": j.end,
                    "nodes": [n.id for n, _, _ in j.placed],
                    "waited": j.waited,
                }
                for j in self.jobs.values()
            },
            "history": list(self.history),
        }


def simulator(cluster: Cluster, order: str, placement: str, ties: str = "", seed: int = 0, **more: Any) -> Simulator:
    """A simulator with a cluster's nodes; ``more``: as :class:`Simulator`."""
    sim = Simulator(order, placement, ties, seed, **more)
    sim.types, sim.racks = list(cluster.types), list(cluster.racks)
    for n, name in enumerate(cluster.names):
        gpus, gpu_memory, kind, cpu, memory = (
            getattr(cluster, c)[n].item() for c in ("gpus", "gpu_memory", "gpu_type", "cpu", "memory")
        )
        rack, domain = cluster.rack[n].item(), cluster.domain[n].item()
        sim.nodes.append(Node(name, gpus, gpu_memory, kind, cpu, memory, rack=rack, domain=domain))
    return sim


def simulate(
    jobs: Jobs, cluster: Cluster, order: str, placement: str, ties: str = "", seed: int = 0, **more: Any
) -> Simulator:
    """A whole trace on a cluster; jobs that can never run are left out; ``more``: as :class:`Simulator`. Slow:
    hundreds of jobs, not thousands."""
    used = cluster.as_one() if find_placement(placement).counted else cluster
    sim = simulator(used, order, placement, ties, seed, **more)
    sim.learn(jobs, used)
    for j in range(len(jobs)):
        sim.add(jobs.take(np.array([j])))
    return sim.run()
