"""The reference engine: the rules of the compiled one in the plainest Python, one step at a time. To read, and to test with.

sim = Simulator(placement="best")
sim.add_node("a", gpus=4, gpu_memory_gb=24)
sim.add_job("train", gpus=2, memory_per_gpu_gb=16, duration=5)
sim.step()      # to the next moment at which something happens
sim.status()    # every GPU free or busy; every job pending, running or completed
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.cluster import ties as tie_rules
from weft.cluster.lacking import closest
from weft.cluster.model import Cluster, Jobs, NodeGroup
from weft.cluster.order import find as find_order
from weft.cluster.placement import find as find_placement


@dataclass
class Node:
    """A node. ``running[i]`` is the job on its GPU i, or None. A capacity of -1 is not known and never in the way."""

    id: str
    gpus: int
    gpu_memory: float
    gpu_type: str
    cpu: int = -1
    memory: int = -1

    def __post_init__(self) -> None:
        self.running: list[Any] = [None] * self.gpus
        self.free_cpu, self.free_memory = self.cpu, self.memory

    @property
    def free_gpus(self) -> int:
        return self.running.count(None)

    def fits(self, piece: Piece) -> bool:
        return (
            self.free_gpus >= piece.gpus
            and (not piece.types or self.gpu_type in piece.types)
            and (self.gpu_memory < 0 or self.gpu_memory >= piece.gpu_memory)
            and (self.cpu < 0 or self.free_cpu >= piece.cpu)
            and (self.memory < 0 or self.free_memory >= piece.memory)
        )

    def take(self, piece: Piece, job: Any) -> None:
        for gpu in [i for i, occupant in enumerate(self.running) if occupant is None][: piece.gpus]:
            self.running[gpu] = job
        self.free_cpu -= piece.cpu
        self.free_memory -= piece.memory

    def give_back(self, piece: Piece, job: Any) -> None:
        mine = [i for i, occupant in enumerate(self.running) if occupant == job]
        for gpu in mine[: piece.gpus]:
            self.running[gpu] = None
        self.free_cpu += piece.cpu
        self.free_memory += piece.memory


@dataclass(frozen=True)
class Piece:
    """What one node gives to a job."""

    gpus: int
    gpu_memory: float
    cpu: int
    memory: int
    types: tuple[str, ...]


@dataclass
class Job:
    """A job and what has become of it: ``pending``, ``running`` or ``completed``."""

    id: Any
    submit: float
    duration: float
    row: Jobs  # the one row that it is
    key: tuple[float, ...]  # its place in the queue: what comes first is served first
    state: str = "pending"
    start: float | None = None
    end: float | None = None
    placed: list[tuple[Node, Piece]] = field(default_factory=list)
    reason: str = ""  # what it waits for now
    waited: dict[str, float] = field(default_factory=dict)  # seconds for each reason; together its wait


class Simulator:
    """A cluster, a queue and a clock. At one moment jobs complete, then jobs arrive, then whoever may start does.

    Args:
        order: ``fifo``, ``sjf`` …: the head of the queue waits and nobody passes it; with ``-skip`` everyone who fits may.
        placement: ``best``, ``first``, ``worst`` …: which of the fitting nodes.
        ties: ``lowest`` or ``highest`` of equally good nodes, or ``random``; the placement's own rule by default.
        seed: of random ties.

    Raises:
        ValueError: an unknown order, placement or rule.
    """

    def __init__(self, order: str = "fifo", placement: str = "best", ties: str = "", seed: int = 0):
        self.order, self.skip = find_order(order)
        self.placement = find_placement(placement)
        self.ties = tie_rules.check(ties or self.placement.ties)
        self.random = tie_rules.first_state(seed)
        self.now = 0.0
        self.nodes: list[Node] = []
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
    ) -> None:
        """A node with so many GPUs, each with so many GB; cores and main memory are not looked at while they are 0."""
        if any(node.id == id for node in self.nodes):
            raise ValueError(f"node '{id}' is there already; a node needs a name of its own")
        group = NodeGroup(1, gpus, gpu_type, gpu_memory_gb, cpu, memory_gb, name=id)
        one = Cluster.of([group])
        self.nodes.append(Node(id, gpus, one.gpu_memory[0].item(), gpu_type, one.cpu[0].item(), one.memory[0].item()))

    def add_job(
        self, id: Any, gpus: int, memory_per_gpu_gb: float = 0.0, duration: float = 1.0, submit: float | None = None
    ) -> None:
        """A job that is submitted now, or at ``submit`` seconds.

        Raises:
            ValueError: a name that is taken, a moment that is past, numbers below 0, or a job that fits on no empty node:
                which node comes nearest, and what it lacks.
        """
        if submit is not None and submit < self.now:
            raise ValueError(f"job '{id}' is submitted at {submit:g} s, and it is {self.now:g} s already")
        at = self.now if submit is None else submit
        row = Jobs(
            np.array([at]), np.array([duration]), np.array([gpus]), id=[id], gpu_memory=np.array([memory_per_gpu_gb])
        )
        if reason := self.add(row):
            raise ValueError(f"job '{id}' can never run: {reason}")

    def add(self, row: Jobs) -> str:
        """Adds one row of a trace; says why it can never run, if so, and leaves it out."""
        id = row.id[0]
        if id in self.jobs:
            raise ValueError(f"job '{id}' is there already; a job needs a name of its own")
        key = (*(column[0].item() for column in self.order.keys(row)), row.submit[0].item(), len(self.jobs))
        job = Job(id, row.submit[0].item(), row.duration[0].item(), row, key)
        before, state = [(n.running[:], n.free_cpu, n.free_memory) for n in self.nodes], self.random
        for node in self.nodes:  # an empty cluster, for a moment
            node.running, node.free_cpu, node.free_memory = [None] * node.gpus, node.cpu, node.memory
        able = self.place(job)
        for node, (running, cpu, memory) in zip(self.nodes, before, strict=True):
            node.running, node.free_cpu, node.free_memory = running, cpu, memory
        self.random = state
        job.placed = []
        if not able:
            return closest(row, 0, self.cluster())
        self.jobs[id] = job
        self.coming.append(job)
        self.coming.sort(key=lambda j: j.submit)  # stable: jobs of one moment stay in the order they were added
        return ""

    def cluster(self) -> Cluster:
        """The nodes as columns."""
        groups = [
            NodeGroup(1, n.gpus, n.gpu_type, max(n.gpu_memory, 0), max(n.cpu, 0) / 1000, max(n.memory, 0) / 1024)
            for n in self.nodes
        ]
        return dataclasses.replace(Cluster.of(groups), names=tuple(n.id for n in self.nodes))

    # ---- running -----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[float, str, Any]]:
        """Goes to the next moment at which a job completes or arrives, and returns what happened: (seconds, what, job).

        Nothing is left to happen when the list is empty.
        """
        moments = [j.submit for j in self.coming] + [
            j.end for j in self.jobs.values() if j.state == "running" and j.end is not None
        ]
        if not moments:
            return []
        for job in self.queue:
            job.waited[job.reason] = job.waited.get(job.reason, 0.0) + min(moments) - self.now
        self.now = min(moments)
        seen = len(self.history)
        for job in [j for j in self.jobs.values() if j.state == "running" and j.end == self.now]:
            for node, piece in job.placed:
                node.give_back(piece, job.id)
            self.happens(job, "completed")
        while self.coming and self.coming[0].submit == self.now:
            job = self.coming.pop(0)
            self.queue.append(job)
            self.happens(job, "pending")
        self.queue.sort(key=lambda j: j.key)
        for job in list(self.queue):
            if self.place(job):
                self.queue.remove(job)
                job.start, job.end = self.now, self.now + job.duration
                self.happens(job, "running")
            elif not self.skip:
                break
        for job in self.queue:
            job.reason = self.why(job)
        return self.history[seen:]

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
        random = self.random
        if self.place(job):
            for node, piece in job.placed:
                node.give_back(piece, job.id)
            job.placed, self.random = [], random
            return "priority"
        pieces, gpus = self.pieces(job.row), int(job.row.gpus[0])
        of_type = [n for n in self.nodes if not pieces[0].types or n.gpu_type in pieces[0].types]
        of_memory = [n for n in of_type if n.gpu_memory < 0 or n.gpu_memory >= pieces[0].gpu_memory]
        for reason, nodes in (("capacity", self.nodes), ("type", of_type), ("memory", of_memory)):
            if sum(n.free_gpus for n in nodes) < gpus:
                return reason
        if len(pieces) > 1:
            return "gang"
        return "host" if any(n.free_gpus >= gpus for n in of_memory) else "fragmentation"

    def place(self, job: Job) -> bool:
        """Gives all its pieces to a job, or none."""
        pieces = self.pieces(job.row)
        if not job.row.pods[0] and len(pieces) > 1 and not self.enough_nodes(pieces):
            return False
        placed: list[tuple[Node, Piece]] = []
        random = self.random
        for piece in pieces:
            node = self.choose(piece)
            if node is None:
                for other, taken in placed:
                    other.give_back(taken, job.id)
                self.random = random  # an attempt that fails leaves nothing behind
                return False
            node.take(piece, job.id)
            placed.append((node, piece))
        job.placed = placed
        return True

    def pieces(self, row: Jobs) -> list[Piece]:
        """A job with pods comes in equal ones; one that is larger than the largest node on whole nodes and one remainder."""
        gpus, pods = int(row.gpus[0]), int(row.pods[0])
        largest = max(n.gpus for n in self.nodes)
        if pods:
            sizes = [(gpus // pods, 1 / pods)] * pods
        elif gpus <= largest or not largest:
            sizes = [(gpus, 1.0)]
        else:
            whole, rest = divmod(gpus, largest)
            sizes = [(largest, largest / gpus)] * whole + [(rest, rest / gpus)] * bool(rest)

        def up(amount: float) -> int:
            return -int(-amount // 1)

        return [
            Piece(
                g,
                float(row.gpu_memory[0]),
                up(row.cpu[0] * part),
                up(row.memory[0] * part),
                row.type_sets[int(row.types[0])],
            )
            for g, part in sizes
        ]

    def enough_nodes(self, pieces: list[Piece]) -> bool:
        """Whether every piece finds a node of its own: the first ones are whole nodes, the last may be smaller."""
        whole = sum(n.fits(pieces[0]) for n in self.nodes)
        alike = sum(p == pieces[0] for p in pieces)
        return whole >= alike and (alike == len(pieces) or sum(n.fits(pieces[-1]) for n in self.nodes) > alike)

    def choose(self, piece: Piece) -> Node | None:
        """The fitting node with the highest score, ties by the rule."""
        scored = [(float(self.placement.score(piece, n)), n) for n in self.nodes if n.fits(piece)]
        if not scored:
            return None
        top = max(score for score, _ in scored)
        best = [n for score, n in scored if score == top]
        if self.ties == "random":
            self.random, index = tie_rules.draw(self.random, len(best))
            return best[index]
        return best[0] if self.ties == "lowest" else best[-1]

    # ---- looking -----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The clock, the job (or None) on every GPU of every node, the state of every job, and the history."""
        return {
            "now": self.now,
            "nodes": {n.id: list(n.running) for n in self.nodes},
            "jobs": {
                j.id: {
                    "state": j.state,
                    "start": j.start,
                    "end": j.end,
                    "nodes": [n.id for n, _ in j.placed],
                    "waited": j.waited,
                }
                for j in self.jobs.values()
            },
            "history": list(self.history),
        }


def simulate(jobs: Jobs, cluster: Cluster, order: str, placement: str, ties: str = "", seed: int = 0) -> Simulator:
    """A whole trace on a cluster; jobs that can never run are left out. Slow: hundreds of jobs, not thousands."""
    sim = Simulator(order, placement, ties, seed)
    seen = cluster.as_one() if sim.placement.counted else cluster
    for n, name in enumerate(seen.names):
        gpus, gpu_memory, kind, cpu, memory = (
            getattr(seen, c)[n].item() for c in ("gpus", "gpu_memory", "gpu_type", "cpu", "memory")
        )
        node = Node(name, gpus, gpu_memory, seen.types[kind], cpu, memory)
        sim.nodes.append(node)
    for j in range(len(jobs)):
        sim.add(jobs.take(np.array([j])))
    return sim.run()
