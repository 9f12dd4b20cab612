"""What the head of the queue is promised under EASY backfill (Lifka 1995), in plain Python; the compiled form of it is
``engine/backfill.py``."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.cluster.model import WHOLE
from weft.cluster.placement import REQUIRED
from weft.cluster.topology import split

if TYPE_CHECKING:
    from weft.cluster.parts import Job, Node, Piece
    from weft.cluster.reference import Simulator


@dataclass
class Promise:
    """Pieces on nodes at a moment.

    Args:
        job: whose it is.
        shadow: the moment, by the estimates of what runs.
        held: the pieces that each node is to take then, by its name.
    """

    job: Job
    shadow: float
    held: dict[str, list[Piece]] = field(default_factory=dict)


def promise(sim: Simulator, job: Job) -> Promise:
    """The nodes that will first be able to take the job's pieces, lower numbers first where equal, and when they all are."""
    pieces = sim.pieces(job.row)
    one_rack = len(pieces) > 1 and sim.placement.topology == REQUIRED
    racks = split(sim.nodes, "rack") if one_rack else [sim.nodes]
    among = _together if job.row.pods[0] > 1 else _one_each
    made = min((among(sim, job, pieces, nodes) for nodes in racks), key=lambda promise: promise.shadow)
    if made.shadow == math.inf:  # nobody can be counted on to take them before all is free
        made.shadow = max(job.expected for job in sim.jobs.values() if job.state == "running")
    made.shadow = max(made.shadow, sim.now)
    return made


def _one_each(sim: Simulator, job: Job, pieces: list[Piece], nodes: list[Node]) -> Promise:
    """A node for each piece. The shadow time is inf where these nodes never take them all."""
    made = Promise(job, -math.inf)
    for piece in pieces:
        moments = [(soonest(sim, n, piece), i) for i, n in enumerate(nodes) if n.id not in made.held]
        moment, i = min(moments, default=(math.inf, 0))
        made.held[nodes[i].id] = [piece]
        made.shadow = max(made.shadow, moment)
    return made


def _together(sim: Simulator, job: Job, pieces: list[Piece], nodes: list[Node]) -> Promise:
    """The same for equal pieces of which a node may take several."""
    piece, left = pieces[0], len(pieces)
    ends = sorted(job.expected for job in sim.jobs.values() if job.state == "running")
    able = (end for end in ends if sum(capacity(by(sim, n, end), piece, left) for n in nodes) >= left)
    shadow = next(able, math.inf)
    made = Promise(job, shadow)
    for node in sorted(nodes, key=lambda n: soonest(sim, n, piece)):  # stable: lower numbers first
        count = min(left, capacity(by(sim, node, shadow), piece, left))
        if count:
            made.held[node.id] = [piece] * count
            left -= count
    return made


def by(sim: Simulator, node: Node, when: float) -> Node:
    """The node once everything there has ended that should by then."""
    later = copy.copy(node)
    later.milli, later.pieces = node.milli[:], node.pieces[:]
    for job, piece, gpus in node.pieces:
        if sim.jobs[job].expected <= when:
            later.give_back(piece, job, gpus)
    return later


def soonest(sim: Simulator, node: Node, piece: Piece) -> float:
    """When the node will fit the piece: -inf now, inf never."""
    moments = sorted({sim.jobs[job].expected for job, _, _ in node.pieces})
    return next((when for when in (-math.inf, *moments) if by(sim, node, when).fits(piece)), math.inf)


def capacity(node: Node, piece: Piece, most: int) -> int:
    """How many such pieces it takes at once, up to ``most``. Of shares of several GPUs only one is counted on."""
    if not node.fits(piece):
        return 0
    if piece.milli < WHOLE and piece.gpus > 1:
        return 1
    if piece.gpus:
        free = sum(g // piece.milli for g in node.milli)
        most = min(most, free // piece.gpus)
    if node.cpu >= 0 and piece.cpu:
        most = min(most, node.free_cpu // piece.cpu)
    if node.memory >= 0 and piece.memory:
        most = min(most, node.free_memory // piece.memory)
    return most


def spares(sim: Simulator, made: Promise, node: Node, piece: Piece) -> bool:
    """Whether a job that outlasts the promise may take the piece of this node. Where single GPUs are looked at, a promised node
    is closed to it."""
    if node.id not in made.held:
        return True
    if sim.detailed:
        return False
    later, held = by(sim, node, made.shadow), made.held[node.id]
    return (
        later.free_gpus - sum(p.gpus for p in held) >= piece.gpus
        and (node.cpu < 0 or later.free_cpu - sum(p.cpu for p in held) >= piece.cpu)
        and (node.memory < 0 or later.free_memory - sum(p.memory for p in held) >= piece.memory)
    )
