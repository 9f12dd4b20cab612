"""The reference engine: the rules of the compiled one in the plainest Python, one step at a time. To read, and to test with.

sim = Simulator(placement="best")
sim.add_node("a", gpus=4, gpu_memory_gb=24)
sim.add_job("train", gpus=2, memory_per_gpu_gb=16, duration=5)
sim.step()      # to the next moment at which something happens
sim.status()    # every GPU free or busy; every job pending, running or completed
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from itertools import repeat
from typing import Any

import numpy as np

from weft.cluster import plan, preempt, quota, tenants, topology
from weft.cluster import ties as tie_rules
from weft.cluster.lacking import closest
from weft.cluster.model import WHOLE, Cluster, Jobs, NodeGroup
from weft.cluster.order import KNOWN
from weft.cluster.order import find as find_order
from weft.cluster.parts import Job, Node, Piece
from weft.cluster.placement import NOTHING, REQUIRED
from weft.cluster.placement import find as find_placement
from weft.cluster.promise import Promise, promise, spares
from weft.cluster.quota import NONE_GIVEN, Quota


class Simulator:
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
        self.placement = find_placement(placement)
        topology.check(self.placement, self.order, self.mode)
        self.ties = tie_rules.check(ties or self.placement.ties)
        self.random = tie_rules.first_state(seed)
        self.now = 0.0
        self.context = NOTHING  # what the placement knows of the whole trace
        self.plan: dict[Any, list[plan.Stay]] = {}  # of conservative backfill: where and when those who wait will be
        self.types: list[str] = []
        self.promised: Promise | None = None  # what the head of the queue has been promised
        self.detailed = False  # whether single GPUs are looked at
        self.outlasting = False  # whether the job that is being placed outlasts that moment
        self.nodes: list[Node] = []
        self.racks: list[str] = []
        self.domains: list[str] = []
        self.jobs: dict[Any, Job] = {}
        self.coming: list[Job] = []
        self.queue: list[Job] = []
        self.history: list[tuple[float, str, Any]] = []

    # ---- building ----------------------------------------------------------------------------------------------------

    def add_node(
        self,
        id: str,
        gpus: int,
        gpu_memory_gb: float = 0.0,
        gpu_type: str = "gpu",
        cpu: float = 0.0,
        memory_gb: float = 0.0,
        rack: str = "",
        nvlink_domain: str = "",
    ) -> None:
        """A node with so many GPUs, each with so many GB; cores and main memory are not looked at while they are 0. Without a
        name of an NVLink domain it is one of its own."""
        if any(node.id == id for node in self.nodes):
            raise ValueError(f"node '{id}' is there already; a node needs a name of its own")
        group = NodeGroup(1, gpus, gpu_type, gpu_memory_gb, cpu, memory_gb, name=id)
        one = Cluster.of([group])
        self.types += [gpu_type] * (gpu_type not in self.types)
        kind = self.types.index(gpu_type)
        node = Node(id, gpus, one.gpu_memory[0].item(), kind, one.cpu[0].item(), one.memory[0].item())
        self.racks += [rack] * (rack not in self.racks)
        known = bool(nvlink_domain) and nvlink_domain in self.domains
        self.domains += [nvlink_domain] * (not known)
        node.rack = self.racks.index(rack)
        node.domain = self.domains.index(nvlink_domain) if known else len(self.domains) - 1
        if any(other.domain == node.domain and other.rack != node.rack for other in self.nodes):
            raise ValueError(f"node '{id}': nvlink_domain '{nvlink_domain}' lies in another rack; expected one rack")
        self.nodes.append(node)

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
        key = (*(column[0].item() for column in self.order.keys(row)), row.submit[0].item(), len(self.jobs))
        job = Job(id, row.submit[0].item(), row.duration[0].item(), row, key, number=len(self.jobs))
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

    def cluster(self) -> Cluster:
        """The nodes as columns."""
        groups = [
            NodeGroup(
                1, n.gpus, self.types[n.gpu_type], max(n.gpu_memory, 0), max(n.cpu, 0) / 1000, max(n.memory, 0) / 1024
            )
            for n in self.nodes
        ]
        return dataclasses.replace(
            Cluster.of(groups),
            names=tuple(n.id for n in self.nodes),
            rack=np.array([n.rack for n in self.nodes]),
            racks=tuple(self.racks),
            domain=np.array([n.domain for n in self.nodes]),
        )

    # ---- running -----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[float, str, Any]]:
        """Goes to the next moment at which a job completes or arrives, and returns what happened: (seconds, what, job).

        Nothing is left to happen when the list is empty.
        """
        if not self.learned and self.jobs:
            self.learn(self.known(), self.cluster())
        running = [j for j in self.jobs.values() if j.state == "running"]
        moments = [j.submit for j in self.coming] + [min(j.end, j.falls) for j in running if j.end is not None]
        if not moments:
            return []
        for job in self.queue:
            job.waited[job.reason] = job.waited.get(job.reason, 0.0) + min(moments) - self.now
        self.now = min(moments)
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
        if self.order.preemption:
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
        random = self.random
        if self.place(job):
            for node, piece, gpus in job.placed:
                node.give_back(piece, job.id, gpus)
            job.placed, self.random = [], random
            return "priority"
        pieces, asked = self.pieces(job.row), int(job.row.gpus[0] * job.row.milli[0])
        of_type = [n for n in self.nodes if pieces[0].types >> n.gpu_type & 1]
        of_memory = [n for n in of_type if n.gpu_memory < 0 or n.gpu_memory >= pieces[0].gpu_memory]
        for reason, nodes in (("capacity", self.nodes), ("type", of_type), ("memory", of_memory)):
            if sum(sum(n.milli) for n in nodes) < asked:
                return reason
        if len(pieces) > 1:
            required = self.placement.topology == REQUIRED
            return "topology" if required and topology.takes(self, job, self.nodes, pieces) == len(pieces) else "gang"
        bare = dataclasses.replace(pieces[0], cpu=0, memory=0)
        return "host" if any(n.fits(bare) for n in of_memory) else "fragmentation"

    def place(self, job: Job) -> bool:
        """Gives all its pieces to a job, or none."""
        pieces = self.pieces(job.row)
        if not job.row.pods[0] and len(pieces) > 1 and not self.enough_nodes(pieces):
            return False
        placed: list[tuple[Node, Piece, list[int]]] = []
        random = self.random
        among = topology.where(self, job, pieces) if self.placement.topology else repeat(self.nodes)
        for piece, nodes in zip(pieces, among, strict=False):
            node = self.choose(piece, nodes)
            if node is None:
                for other, taken, on in placed:
                    other.give_back(taken, job.id, on)
                self.random = random  # an attempt that fails leaves nothing behind
                return False
            gpus = self.pick(node, piece)
            node.take(piece, job.id, gpus)
            placed.append((node, piece, gpus))
        job.placed = placed
        return True

    def pieces(self, row: Jobs) -> list[Piece]:
        """A job with pods comes in equal ones; one that is larger than the largest node on whole nodes and one remainder."""
        gpus, pods = int(row.gpus[0]), int(row.pods[0])
        largest = max(n.gpus for n in self.nodes)
        if pods:
            sizes = [(gpus // pods, 1 / pods)] * pods
        elif gpus <= largest or not largest or row.milli[0] < WHOLE:
            sizes = [(gpus, 1.0)]
        else:
            whole, rest = divmod(gpus, largest)
            sizes = [(largest, largest / gpus)] * whole + [(rest, rest / gpus)] * bool(rest)

        def up(amount: float) -> int:
            return -int(-amount // 1)

        accepted = row.type_sets[int(row.types[0])]
        types = sum(1 << i for i, name in enumerate(self.types) if not accepted or name in accepted)
        return [
            Piece(
                g,
                int(row.milli[0]),
                float(row.gpu_memory[0]),
                up(row.cpu[0] * part),
                up(row.memory[0] * part),
                types,
            )
            for g, part in sizes
        ]

    def enough_nodes(self, pieces: list[Piece]) -> bool:
        """Whether every piece finds a node of its own: the first ones are whole nodes, the last may be smaller."""
        whole = sum(self.able(n, pieces[0]) for n in self.nodes)
        alike = sum(p == pieces[0] for p in pieces)
        return whole >= alike and (alike == len(pieces) or sum(self.able(n, pieces[-1]) for n in self.nodes) > alike)

    def able(self, node: Node, piece: Piece) -> bool:
        """Whether the node takes the piece now, and breaks no promise by it."""
        breaks = self.promised and self.outlasting and not spares(self, self.promised, node, piece)
        return not breaks and node.fits(piece)

    def choose(self, piece: Piece, nodes: list[Node] | None = None) -> Node | None:
        """Of these nodes, or all, the fitting one with the highest score, ties by the rule."""
        among = self.nodes if nodes is None else nodes
        scored = [(self.score(piece, n)[0], n) for n in among if self.able(n, piece)]
        if not scored:
            return None
        top = max(score for score, _ in scored)
        best = [n for score, n in scored if score == top]
        if self.ties == "random":
            return best[self.draw(len(best))]
        return best[0] if self.ties == "lowest" else best[-1]

    def score(self, piece: Piece, node: Node) -> tuple[float, int]:
        """What the placement thinks of a node, and, where it says so, the GPU that a share should take."""
        score: Any = self.placement.score
        both = score(piece, node, self.context) if len(inspect.signature(score).parameters) == 3 else score(piece, node)
        return both if isinstance(both, tuple) else (float(both), -1)

    def pick(self, node: Node, piece: Piece) -> list[int]:
        """Whole GPUs from the lowest number; for a share the placement's choice, a random GPU, or the tightest."""
        taken: list[int] = []
        for _ in range(piece.gpus):
            able = [g for g in range(node.gpus) if g not in taken and node.milli[g] >= piece.milli]
            found = min(able, key=lambda g: node.milli[g])
            if piece.milli < WHOLE and self.placement.gpu == "score" and piece.gpus == 1:
                found = self.score(piece, node)[1]
            elif piece.milli < WHOLE and self.placement.gpu == "random":
                for seen, gpu in enumerate(able, start=1):  # reservoir sampling
                    found = gpu if self.draw(seen) == 0 else found
            taken.append(found)
        return taken

    def draw(self, n: int) -> int:
        self.random, number = tie_rules.draw(self.random, n)
        return number

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


def simulate(
    jobs: Jobs, cluster: Cluster, order: str, placement: str, ties: str = "", seed: int = 0, **more: Any
) -> Simulator:
    """A whole trace on a cluster; jobs that can never run are left out; ``more``: as :class:`Simulator`. Slow:
    hundreds of jobs, not thousands."""
    sim = Simulator(order, placement, ties, seed, **more)
    seen = cluster.as_one() if sim.placement.counted else cluster
    sim.types, sim.racks = list(seen.types), list(seen.racks)
    for n, name in enumerate(seen.names):
        gpus, gpu_memory, kind, cpu, memory = (
            getattr(seen, c)[n].item() for c in ("gpus", "gpu_memory", "gpu_type", "cpu", "memory")
        )
        rack, domain = seen.rack[n].item(), seen.domain[n].item()
        sim.nodes.append(Node(name, gpus, gpu_memory, kind, cpu, memory, rack=rack, domain=domain))
    sim.learn(jobs, seen)
    for j in range(len(jobs)):
        sim.add(jobs.take(np.array([j])))
    return sim.run()
