"""The reference engine: the rules of the compiled one in the plainest Python, one step at a time. To read, and to test with.

sim = Simulator(placement="best")
sim.add_node("a", gpus=4, gpu_memory_gb=24)
sim.add_job("train", gpus=2, memory_per_gpu_gb=16, duration=5)
sim.step()      # to the next moment at which something happens
sim.status()    # every GPU free or busy; every job pending, running or completed
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.cluster import plan, preempt, quota, rounds, tenants, topology
from weft.cluster.lacking import closest
from weft.cluster.model import WHOLE, Cluster, Jobs
from weft.cluster.nodes import Nodes
from weft.cluster.order import KNOWN
from weft.cluster.order import find as find_order
from weft.cluster.parts import Job, Node, Piece
from weft.cluster.placement import REQUIRED
from weft.cluster.placement import find as find_placement
from weft.cluster.promise import Promise, promise, spares
from weft.cluster.quota import NONE_GIVEN, Quota


class Simulator(Nodes):
    """A cluster, a queue and a clock. At one moment jobs complete, then jobs arrive, then whoever may start does.

    Args:
        order: ``fifo``, ``sjf`` …: the head of the queue waits and nobody passes it; with ``-skip`` everyone who fits may;
            with ``-easy`` who does not delay the head.
        placement: ``best``, ``first``, ``worst`` …: which of the fitting nodes.
        ties: ``lowest`` or ``highest`` of equally good nodes, or ``random``; the placement's own rule by default.
        seed: of random ties.
        restart_s, checkpoint_s: of an order that stops jobs, and
        weights, quotas: of tenants, all as for :func:`weft.cluster.simulate.simulate`.

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
        weights: Mapping[str, float] = NONE_GIVEN,
        quotas: Mapping[str, Quota] = NONE_GIVEN,
    ):
        self.restart_s, self.checkpoint_s = restart_s, checkpoint_s
        self.learned = False  # whether placement and order have seen the trace
        self.known_to_order = np.zeros(KNOWN)
        self.last_turn = self.first_turn = (
            0  # of orders that stop jobs: in a level who came last, and who was stopped last
        )
        self.order, self.mode = find_order(order)
        quota.check(weights, quotas, self.order, self.mode)
        self.weights, self.quotas = weights, quotas
        self.tenants: dict[str, None] = {}  # all that were named
        super().__init__(placement, ties, seed)
        topology.check(self.placement, self.order, self.mode)
        self.plan: dict[Any, list[plan.Stay]] = {}  # of conservative backfill: where and when those who wait will be
        self.promised: Promise | None = None  # what the head of the queue has been promised
        self.detailed = False  # whether single GPUs are looked at
        self.outlasting = False  # whether the job that is being placed outlasts that moment
        self.jobs: dict[Any, Job] = {}
        self.coming: list[Job] = []
        self.queue: list[Job] = []
        self.history: list[tuple[float, str, Any]] = []

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
    ) -> None:
        """A job that is submitted now, or at ``submit`` seconds; ``share``: it takes so much of each of its GPUs; cores and
        main memory are the whole job's.

        Raises:
            ValueError: a name that is taken, a moment that is past, numbers below 0, or a job that fits on no empty node:
                which node comes nearest, and what it lacks.
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
        )
        if reason := self.add(row):
            raise ValueError(f"job '{id}' can never run: {reason}")

    def add(self, row: Jobs) -> str:
        """Adds one row of a trace; says why it can never run, if so, and leaves it out."""
        id = row.id[0]
        if id in self.jobs:
            raise ValueError(f"job '{id}' is there already; a job needs a name of its own")
        self.detailed = self.detailed or bool(row.milli[0] < WHOLE)
        key = (*(column[0].item() for column in self.order.columns(row)), row.submit[0].item(), len(self.jobs))
        job = Job(id, row.submit[0].item(), row.duration[0].item(), row.read_only(), key, number=len(self.jobs))
        job.work, job.left = job.duration, row.estimate[0].item()
        nodes, state = self.nodes, self.random
        self.nodes = [dataclasses.replace(node) for node in nodes]  # an empty cluster, for a moment
        able = self.place(job)
        self.nodes, self.random = nodes, state
        job.placed = []
        if not able:
            return closest(row, 0, self.cluster(), self.placement.topology == REQUIRED)
        self.tenants |= dict.fromkeys(row.tenants)
        if reason := tenants.never(self, job):
            return reason
        self.jobs[id] = job
        self.coming.append(job)
        self.coming.sort(key=lambda j: j.submit)  # stable: jobs of one moment stay in the order they were added
        return ""

    # ---- running -----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[float, str, Any]]:
        """Goes to the next moment at which a job completes or arrives, and returns what happened: (seconds, what, job).

        Nothing is left to happen when the list is empty.
        """
        if not self.learned and self.jobs:
            self.learn(self.known(), self.cluster())
        moment = self.next_moment()
        if moment == math.inf:
            return []
        running = [j for j in self.jobs.values() if j.state == "running"]
        for job in self.queue:
            job.waited[job.reason] = job.waited.get(job.reason, 0.0) + moment - self.now
        self.now = moment
        seen = len(self.history)
        ended = [j for j in running if j.end == self.now]
        fallen = [j for j in running if j.falls == self.now and j not in ended]
        for job in fallen:
            preempt.fall(self, job)
        for job in ended:
            for node, piece, gpus in job.placed:
                node.give_back(piece, job.id, gpus)
            job.lost += job.resume
            self.happens(job, "completed")
        came = [job for job in self.coming if job.submit == self.now]
        for job in came:
            self.coming.remove(job)
            self.queue.append(job)
            if self.order.preemption:
                preempt.arrive(self, job)
            self.happens(job, "pending")
        self.queue.sort(key=lambda j: j.key)
        if self.order.rounds:
            rounds.decide(self)
        elif self.order.preemption:
            preempt.start_in_turn(self, fallen)
        elif self.mode == "-conservative":
            self.start_as_planned(ended, came)
        elif self.order.share or self.quotas:
            tenants.start_in_turn(self)
        else:
            self.start_in_order(ended)
        for job in self.queue:
            job.reason = self.why(job)
        return self.history[seen:]

    def next_moment(self) -> float:
        """When a job completes or arrives, or it is time for a round; inf when nothing is left to happen."""
        moments = [min(j.end, j.falls) for j in self.jobs.values() if j.state == "running" and j.end is not None]
        if self.order.rounds and (moments or self.queue):
            moments.append(rounds.following(self.now, self.order.rounds.every_s))
        return min([job.submit for job in self.coming[:1]] + moments, default=math.inf)

    def start_in_order(self, ended: list[Job]) -> None:
        """Starts who may: strictly, whoever fits, or whoever does not delay the head, which is promised nodes until something
        is freed or another job is the head."""
        if self.promised and (ended or self.queue[0] is not self.promised.job):
            self.promised = None
        for job in list(self.queue):
            shadow = self.promised.shadow if self.promised else math.inf
            self.outlasting = bool(job.row.estimate[0] > shadow - self.now)
            if self.place(job):
                self.begin(job, job.row.estimate[0].item())
            elif not self.mode:
                break
            elif self.mode == "-easy" and self.promised is None:
                self.promised = promise(self, job)
        self.outlasting = False

    def start_as_planned(self, ended: list[Job], came: list[Job]) -> None:
        """Plans everyone who waits and has no place yet, and starts who is planned for now."""
        if self.detailed:
            raise ValueError(plan.NO_DETAILS)
        if any(j.expected != self.now for j in ended) or not plan.holds(self):
            self.plan.clear()
        for job in self.queue:
            if job in came:
                for later in self.queue[self.queue.index(job) :]:
                    self.plan.pop(later.id, None)
                break
        stays = plan.running(self) + [stay for mine in self.plan.values() for stay in mine]
        for job in list(self.queue):
            if job.id not in self.plan:
                self.plan[job.id] = plan.earliest(self, job, stays)
                stays += self.plan[job.id]
            if self.plan[job.id] and self.plan[job.id][0].begin == self.now:
                job.placed = []
                for stay in self.plan.pop(job.id):
                    gpus = self.pick(stay.node, stay.piece)
                    stay.node.take(stay.piece, job.id, gpus)
                    job.placed.append((stay.node, stay.piece, gpus))
                self.begin(job, plan.estimated(job))

    def begin(self, job: Job, estimate: float) -> None:
        """Starts a job that has its nodes."""
        self.queue.remove(job)
        job.start, job.end, job.expected = self.now, self.now + job.duration, self.now + estimate
        self.happens(job, "running")

    def run(self) -> Simulator:
        """Steps until nothing is left to happen."""
        while self.step():
            pass
        return self

    def happens(self, job: Job, state: str) -> None:
        job.state = state
        self.history.append((self.now, state, job.id))

    def why(self, job: Job) -> str:
        """What a waiting job would lack if it were alone in the queue: the first of ``simulate.REASONS`` that holds."""
        if not tenants.admits(self, job):
            return "quota"
        random, asked = self.random, int(job.row.gpus[0] * job.row.milli[0])
        if sum(sum(n.milli) for n in self.nodes) < asked:
            return "capacity"
        if self.place(job):
            for node, piece, gpus in job.placed:
                node.give_back(piece, job.id, gpus)
            job.placed, self.random = [], random
            return "priority"
        pieces = self.pieces(job.row)
        of_type = [n for n in self.nodes if pieces[0].types >> n.gpu_type & 1]
        of_memory = [n for n in of_type if n.gpu_memory < 0 or n.gpu_memory >= pieces[0].gpu_memory]
        for reason, nodes in (("type", of_type), ("memory", of_memory)):
            if sum(sum(n.milli) for n in nodes) < asked:
                return reason
        if len(pieces) > 1:
            required = self.placement.topology == REQUIRED
            return "topology" if required and topology.takes(self, job, self.nodes, pieces) == len(pieces) else "gang"
        bare = dataclasses.replace(pieces[0], cpu=0, memory=0)
        return "host" if any(n.fits(bare) for n in of_memory) else "fragmentation"

    def able(self, node: Node, piece: Piece) -> bool:
        """Whether the node takes the piece now, and breaks no promise by it."""
        breaks = self.promised and self.outlasting and not spares(self, self.promised, node, piece)
        return not breaks and super().able(node, piece)

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

    # ---- looking -----------------------------------------------------------------------------------------------------

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
    """A simulator with a cluster's nodes."""
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
    counted = find_placement(placement).counted
    seen = cluster.as_one() if counted else cluster
    sim = simulator(seen, order, placement, ties, seed, **more)
    sim.learn(jobs, seen)
    for j in range(len(jobs)):
        sim.add(jobs.take(np.array([j])))
    return sim.run()
