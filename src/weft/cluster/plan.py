"""Conservative backfill (Feitelson and Weil 1998) in plain Python: everyone who waits has a place in the plan, and nobody may
delay it. The compiled form is ``engine/conservative.py``.

In the queue's order each job gets the earliest time at which it fits for as long as its estimate says, beside what runs (until
its own estimate ends) and those before it. Who is planned for now starts. The plan is kept, except that it is made anew when
somebody ends before the estimate or stays beyond it, and from a newcomer on that the order puts before others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.cluster.parts import Job, Node, Piece
    from weft.cluster.reference import Simulator


LEAST_S = 1e-3  # a plan needs some length
NO_DETAILS = "conservative backfill plans whole GPUs; expected no shares, and no placement that looks at single ones"


@dataclass(frozen=True)
class Stay:
    """A piece on a node from a moment to another."""

    node: Node
    piece: Piece
    begin: float
    end: float


def running(sim: Simulator) -> list[Stay]:
    """What runs, until its estimate ends. Who is past that may stay for ever."""
    return [
        Stay(node, piece, -math.inf, job.expected if job.expected > sim.now else math.inf)
        for job in sim.jobs.values()
        if job.state == "running"
        for node, piece, _ in job.placed
    ]


def estimated(job: Job) -> float:
    """Its estimate, seconds, at least ``LEAST_S``."""
    return max(job.row.estimate[0].item(), LEAST_S)


def holds(sim: Simulator) -> bool:
    """Whether nobody stays beyond its estimate, and nobody missed its place in the plan for that."""
    return all(j.expected > sim.now for j in sim.jobs.values() if j.state == "running") and all(
        stay.begin >= sim.now for mine in sim.plan.values() for stay in mine
    )


def earliest(sim: Simulator, job: Job, stays: list[Stay]) -> list[Stay]:
    """The job's pieces at the earliest time at which they all fit; none where that is never."""
    estimate = estimated(job)
    for begin in [sim.now, *sorted({stay.end for stay in stays if sim.now < stay.end < math.inf})]:
        if found := _at(sim, job, stays, begin, begin + estimate):
            return found
    return []


def _at(sim: Simulator, job: Job, stays: list[Stay], begin: float, end: float) -> list[Stay]:
    random = sim.random
    mine: list[Stay] = []
    for piece in sim.pieces(job.row):
        views = []
        for n in sim.nodes:
            taken = [stay for stay in mine if stay.node is n]
            if taken and not job.row.pods[0]:
                continue
            view = least(n, [*stays, *taken], begin, end)
            if able(view, piece):
                views.append((sim.score(piece, view)[0], n))  # type: ignore[arg-type]
        if not views:
            sim.random = random  # an attempt that fails leaves nothing behind
            return []
        top = max(score for score, _ in views)
        best = [n for score, n in views if score == top]
        choice = 0 if sim.ties == "lowest" else -1
        if sim.ties == "random":
            choice = sim.draw(len(best))
        mine.append(Stay(best[choice], piece, begin, end))
    return mine


def least(node: Node, stays: list[Stay], begin: float, end: float) -> SimpleNamespace:
    """The node with the least that is free of it between two moments."""
    here = [stay for stay in stays if stay.node is node]
    moments = [begin, *(stay.begin for stay in here if begin < stay.begin < end)]
    present = [[s.piece for s in here if s.begin <= m < s.end] for m in moments]
    return SimpleNamespace(
        id=node.id,
        gpus=node.gpus,
        gpu_type=node.gpu_type,
        gpu_memory=node.gpu_memory,
        cpu=node.cpu,
        memory=node.memory,
        free_gpus=min(node.gpus - sum(p.gpus for p in pieces) for pieces in present),
        free_cpu=min(node.cpu - sum(p.cpu for p in pieces) for pieces in present),
        free_memory=min(node.memory - sum(p.memory for p in pieces) for pieces in present),
    )


def able(view: SimpleNamespace, piece: Piece) -> bool:
    return (
        view.free_gpus >= piece.gpus
        and bool(piece.types >> view.gpu_type & 1)
        and (view.gpu_memory < 0 or view.gpu_memory >= piece.gpu_memory)
        and (view.cpu < 0 or view.free_cpu >= piece.cpu)
        and (view.memory < 0 or view.free_memory >= piece.memory)
    )
