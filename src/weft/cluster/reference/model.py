"""Nodes, pieces of jobs, and jobs, as the reference simulator has them."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from weft.cluster.model import WHOLE, Jobs, size_of


@cache
def arguments_of(function: Callable[..., Any]) -> int:
    """How many arguments a policy's function takes: it may leave out the last ones."""
    return len(inspect.signature(function).parameters)


@dataclass
class Node:
    """A node. A capacity of -1 is unknown and never a limit. Scores read the same names as in ``engine/node.py``."""

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
        self.milli = [WHOLE] * self.gpus  # free thousandths of each GPU
        self.free_cpu, self.free_memory, self.note = self.cpu, self.memory, math.nan

    @property
    def free_gpus(self) -> int:
        return self.milli.count(WHOLE)

    @property
    def mix(self) -> list[int]:
        """How many pieces of each size it holds: shares, 1, 2, 4, 8, any other number of GPUs."""
        return [sum(piece.size == size for _, piece, _ in self.pieces) for size in range(6)]

    def fits(self, piece: "Piece") -> bool:
        return (
            sum(free >= piece.milli for free in self.milli) >= piece.gpus
            and bool(piece.types >> self.gpu_type & 1)
            and (self.gpu_memory < 0 or self.gpu_memory >= piece.gpu_memory)
            and (self.cpu < 0 or self.free_cpu >= piece.cpu)
            and (self.memory < 0 or self.free_memory >= piece.memory)
        )

    def take(self, piece: "Piece", job: Any, gpus: list[int]) -> None:
        self.pieces.append((job, piece, gpus))
        self.change(piece, gpus, 1)

    def give_back(self, piece: "Piece", job: Any, gpus: list[int]) -> None:
        self.pieces.remove((job, piece, gpus))
        self.change(piece, gpus, -1)

    def change(self, piece: "Piece", gpus: list[int], sign: int) -> None:
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
    """The part of a job that is placed on one node."""

    gpus: int
    milli: int  # thousandths of each GPU
    gpu_memory: float
    cpu: int
    memory: int
    types: int  # a bit for each of the simulator's types that it accepts
    spread: bool = False  # of a job with several pods of several shares each: takes the GPUs with the most free

    @property
    def size(self) -> int:
        return size_of(self.gpus, self.milli)


@dataclass
class Job:
    """A job and its state: ``pending``, ``running`` or ``completed``."""

    id: Any
    submit: float
    duration: float
    row: Jobs  # its row of the trace, read-only
    key: tuple[float, ...]  # its position in the queue, small values first
    state: str = "pending"
    start: float | None = None
    end: float | None = None
    expected_end: float = math.inf  # by its estimate
    placed: list[tuple[Node, Piece, list[int]]] = field(default_factory=list)
    reason: str = ""  # what it waits for now
    waited: dict[str, float] = field(default_factory=dict)  # seconds for each reason; together its wait
    number: int = 0  # in order of submission
    # For orders that preempt (preemption.py):
    remaining: float = 0.0  # seconds of its estimate that are not done
    work: float = 0.0  # seconds of its duration that are not done
    served: float = 0.0  # seconds that it held its GPUs, up to its last preemption
    priority_key: float = 0.0  # small values first
    level: int = 0  # how many service thresholds it has passed
    sequence: float = 0.0  # orders the jobs of a level: those with `runs_in_level` first
    runs_in_level: bool = False  # its sequence number was given while it ran in this level
    last_start: float = 0.0
    restart: float = 0.0  # seconds after `last_start` before it works on
    demotion: float = math.inf  # when it passes the next threshold
    stops: int = 0  # how often it was preempted
    lost: float = 0.0  # seconds that it held its GPUs without progress
    stretches: list[tuple[float, float, list[str], list[int]]] = field(
        default_factory=list
    )  # begin, end, nodes of past runs, and a bit for each GPU of those nodes

    @property
    def tenant(self) -> str:
        return self.row.tenants[int(self.row.tenant[0])]

    @cached_property
    def milli_gpus(self) -> int:
        """Thousandths of GPUs that it requests."""
        return int(self.row.gpus[0] * self.row.milli[0])

    @property
    def estimate(self) -> float:
        return float(self.row.estimate[0])

    def release(self) -> None:
        """Frees its pieces; ``placed`` still says where they were."""
        for node, piece, gpus in self.placed:
            node.give_back(piece, self.id, gpus)
