"""What the plain engine moves about: nodes, pieces of jobs, and jobs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from weft.cluster.model import WHOLE, Jobs, size_of


@dataclass
class Node:
    """A node. A capacity of -1 is not known and never in the way. Scores look at the same names as in ``engine/node.py``."""

    id: str
    gpus: int
    gpu_memory: float
    gpu_type: int  # which of the simulator's types
    cpu: int = -1
    memory: int = -1
    note: float = math.nan
    rack: int = 0
    domain: int = 0

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.pieces: list[tuple[Any, Piece, list[int]]] = []  # a job, what it takes, which GPUs
        self.milli = [WHOLE] * self.gpus  # thousandths that are free of each GPU
        self.free_cpu, self.free_memory, self.note = self.cpu, self.memory, math.nan

    @property
    def free_gpus(self) -> int:
        return self.milli.count(WHOLE)

    @property
    def mix(self) -> list[int]:
        """How many pieces of each size it holds: shares, 1, 2, 4, 8, any other number of GPUs."""
        return [sum(piece.size == size for _, piece, _ in self.pieces) for size in range(6)]

    def fits(self, piece: Piece) -> bool:
        return (
            sum(free >= piece.milli for free in self.milli) >= piece.gpus
            and bool(piece.types >> self.gpu_type & 1)
            and (self.gpu_memory < 0 or self.gpu_memory >= piece.gpu_memory)
            and (self.cpu < 0 or self.free_cpu >= piece.cpu)
            and (self.memory < 0 or self.free_memory >= piece.memory)
        )

    def take(self, piece: Piece, job: Any, gpus: list[int]) -> None:
        self.pieces.append((job, piece, gpus))
        self.change(piece, gpus, 1)

    def give_back(self, piece: Piece, job: Any, gpus: list[int]) -> None:
        self.pieces.remove((job, piece, gpus))
        self.change(piece, gpus, -1)

    def change(self, piece: Piece, gpus: list[int], sign: int) -> None:
        for gpu in gpus:
            self.milli[gpu] -= sign * piece.milli
        self.free_cpu -= sign * piece.cpu
        self.free_memory -= sign * piece.memory
        self.note = math.nan

    def occupants(self) -> list[Any]:
        """For each GPU None, the job on it, or the jobs that share it."""
        on = [tuple(job for job, _, gpus in self.pieces if gpu in gpus) for gpu in range(self.gpus)]
        return [jobs if len(jobs) > 1 else jobs[0] if jobs else None for jobs in on]


@dataclass(frozen=True)
class Piece:
    """What one node gives to a job."""

    gpus: int
    milli: int  # thousandths of each
    gpu_memory: float
    cpu: int
    memory: int
    types: int  # a bit for each of the simulator's types that it accepts
    apart: bool = False  # of a job with several pods of several shares each, which take the GPUs with the most room

    @property
    def size(self) -> int:
        return size_of(self.gpus, self.milli)


@dataclass
class Job:
    """A job and what has become of it: ``pending``, ``running`` or ``completed``."""

    id: Any
    submit: float
    duration: float
    row: Jobs  # the one row that it is, read-only
    key: tuple[float, ...]  # its place in the queue: what comes first is served first
    state: str = "pending"
    start: float | None = None
    end: float | None = None
    expected: float = math.inf  # its end by its estimate
    placed: list[tuple[Node, Piece, list[int]]] = field(default_factory=list)
    reason: str = ""  # what it waits for now
    waited: dict[str, float] = field(default_factory=dict)  # seconds for each reason; together its wait
    number: int = 0  # how many came before it
    # Of orders that stop jobs (preempt.py):
    left: float = 0.0  # seconds of its estimate that are not done
    work: float = 0.0  # of its duration
    served: float = 0.0  # seconds that it held its GPUs, up to its last stop
    rank: float = 0.0  # while it waits its key, while it runs its standing
    level: int = 0  # how many thresholds its service has passed
    turn: float = 0.0  # orders the jobs of a level, those that are
    settled: bool = False  # (they run) first
    begins: float = 0.0  # when it started last, and
    resume: float = 0.0  # the seconds that it then needed before it worked on
    falls: float = math.inf  # when it comes to the next level
    stops: int = 0
    lost: float = 0.0  # seconds that it held its GPUs without getting on
    stretches: list[tuple[float, float, list[str], list[int]]] = field(
        default_factory=list
    )  # begin, end, nodes of those that are over, and a bit for each GPU of those nodes
