"""Backfill: EASY (Lifka 1995) and conservative (Feitelson and Weil 1998).

EASY: the head of the queue has a reservation of the nodes that will be first able to take it, at the *shadow time*,
when the last of them is. A job behind it may start if it fits now, and either ends by the shadow time by its estimate
or leaves the reserved nodes what the head will need of them. The compiled form is ``engine/easy_loop.py``.

Conservative: every waiting job has a reservation in a plan. In the queue's order each job gets the earliest time at
which it fits for as long as its estimate, beside the running jobs (until their estimates end) and the jobs before it.
Jobs that are planned for now start. The plan is kept, but is made anew when a job ends before its estimate or runs
beyond it, and from a new job on that the order puts before others. The compiled form is
``engine/conservative_loop.py``.
"""

import copy
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

from weft.cluster.model import WHOLE
from weft.cluster.order import LEAST_S
from weft.cluster.placement import REQUIRED
from weft.cluster.policy import NO_SHARES
from weft.cluster.reference.model import Job, Node, Piece
from weft.cluster.reference.placing import split
from weft.cluster.reference.state import State

# ---- EASY: a reservation for the head of the queue ------------------------------------------------------------------


@dataclass
class Reservation:
    """Pieces on nodes at a time.

    Args:
        job: the head of the queue.
        shadow_time: when all its nodes are able to take it, by the estimates of the running jobs.
        pieces: the pieces that each node is to take then, by the node's id.
    """

    job: Job
    shadow_time: float
    pieces: dict[str, list[Piece]] = field(default_factory=dict)


def reserve(sim: State, job: Job) -> Reservation:
    """The nodes that are first able to take the job's pieces (lower numbers first where equal), and when they all
    are."""
    pieces = sim.pieces(job.row)
    one_rack = len(pieces) > 1 and sim.placement.topology == REQUIRED
    racks = split(sim.nodes, "rack") if one_rack else [sim.nodes]
    reserve_on = _reserve_shared_nodes if job.row.pods[0] > 1 else _reserve_a_node_each
    made = min(
        (reserve_on(sim, job, pieces, nodes) for nodes in racks), key=lambda reservation: reservation.shadow_time
    )
    if made.shadow_time == math.inf:  # nothing is sure to take them before everything is free
        made.shadow_time = max(job.expected_end for job in sim.running)
    made.shadow_time = max(made.shadow_time, sim.now)
    return made


def _reserve_a_node_each(sim: State, job: Job, pieces: list[Piece], nodes: list[Node]) -> Reservation:
    """A node for each piece. The shadow time is inf where these nodes never take them all."""
    made = Reservation(job, -math.inf)
    for piece in pieces:
        times = [(earliest_fit(sim, n, piece), i) for i, n in enumerate(nodes) if n.id not in made.pieces]
        time, i = min(times, default=(math.inf, 0))
        made.pieces[nodes[i].id] = [piece]
        made.shadow_time = max(made.shadow_time, time)
    return made


def _reserve_shared_nodes(sim: State, job: Job, pieces: list[Piece], nodes: list[Node]) -> Reservation:
    """The same for equal pieces of which a node may take several."""
    piece, rest = pieces[0], len(pieces)
    ends = sorted(job.expected_end for job in sim.running)
    able = (end for end in ends if sum(capacity(node_at(sim, n, end), piece, rest) for n in nodes) >= rest)
    made = Reservation(job, next(able, math.inf))
    for node in sorted(nodes, key=lambda n: earliest_fit(sim, n, piece)):  # stable: lower numbers first
        number = min(rest, capacity(node_at(sim, node, made.shadow_time), piece, rest))
        if number:
            made.pieces[node.id] = [piece] * number
            rest -= number
    return made


def node_at(sim: State, node: Node, time: float) -> Node:
    """The node after everything on it has ended that should by then."""
    later = copy.copy(node)
    later.milli, later.pieces = node.milli[:], node.pieces[:]
    for job, piece, gpus in node.pieces:
        if sim.jobs[job].expected_end <= time:
            later.give_back(piece, job, gpus)
    return later


def earliest_fit(sim: State, node: Node, piece: Piece) -> float:
    """When the piece will fit on the node: -inf now, inf never."""
    times = sorted({sim.jobs[job].expected_end for job, _, _ in node.pieces})
    return next((time for time in (-math.inf, *times) if node_at(sim, node, time).fits(piece)), math.inf)


def capacity(node: Node, piece: Piece, most: int) -> int:
    """How many such pieces it takes at once, up to ``most``. Of pieces of several shares only one is counted on."""
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


def keeps_reservation(sim: State, reservation: Reservation, node: Node, piece: Piece) -> bool:
    """Whether a job that runs beyond the shadow time may take the piece of this node. Where single GPUs are tracked, a
    reserved node is closed to it."""
    if node.id not in reservation.pieces:
        return True
    if sim.detailed:
        return False
    later, reserved = node_at(sim, node, reservation.shadow_time), reservation.pieces[node.id]
    return (
        later.free_gpus - sum(p.gpus for p in reserved) >= piece.gpus
        and (node.cpu < 0 or later.free_cpu - sum(p.cpu for p in reserved) >= piece.cpu)
        and (node.memory < 0 or later.free_memory - sum(p.memory for p in reserved) >= piece.memory)
    )


# ---- conservative: a reservation for every waiting job ---------------------------------------------------------------

Planned = tuple[Node, Piece, float, float]  # a piece on a node, from when to when


def start_as_planned(sim: State, ended: list[Job], arrived: list[Job]) -> None:
    """Plans every waiting job without a reservation, and starts those that are planned for now."""
    if sim.detailed:
        raise ValueError(NO_SHARES)
    if any(job.expected_end != sim.now for job in ended) or not _plan_holds(sim):
        sim.plan.clear()
    first_new = next((k for k, job in enumerate(sim.queue) if job in arrived), len(sim.queue))
    for job in sim.queue[first_new:]:
        sim.plan.pop(job.id, None)
    planned = [
        (node, piece, -math.inf, job.expected_end if job.expected_end > sim.now else math.inf)  # overrunning: for ever
        for job in sim.running
        for node, piece, _ in job.placed
    ]
    planned += [each for pieces in sim.plan.values() for each in pieces]
    for job in list(sim.queue):
        if job.id not in sim.plan:
            sim.plan[job.id] = _earliest(sim, job, planned)
            planned += sim.plan[job.id]
        if sim.plan[job.id] and sim.plan[job.id][0][2] == sim.now:
            job.placed = []
            for node, piece, _, _ in sim.plan.pop(job.id):
                gpus = sim.pick(node, piece)
                node.take(piece, job.id, gpus)
                job.placed.append((node, piece, gpus))
            sim.start(job, max(job.estimate, LEAST_S))


def _plan_holds(sim: State) -> bool:
    """Whether no job runs beyond its estimate, and none missed its planned start because of that."""
    return all(job.expected_end > sim.now for job in sim.running) and all(
        begin >= sim.now for pieces in sim.plan.values() for _, _, begin, _ in pieces
    )


def _earliest(sim: State, job: Job, planned: list[Planned]) -> list[Planned]:
    """The job's pieces at the earliest time at which they all fit; empty where they never do."""
    length = max(job.estimate, LEAST_S)
    for begin in [sim.now, *sorted({end for _, _, _, end in planned if sim.now < end < math.inf})]:
        if found := _plan_at(sim, job, planned, begin, begin + length):
            return found
    return []


def _plan_at(sim: State, job: Job, planned: list[Planned], begin: float, end: float) -> list[Planned]:
    random = sim.random
    mine: list[Planned] = []
    for piece in sim.pieces(job.row):
        scored = []
        for node in sim.nodes:
            on_node = [each for each in mine if each[0] is node]
            if on_node and not job.row.pods[0]:
                continue
            view = _least_free(node, [*planned, *on_node], begin, end)
            if _fits(view, piece):
                scored.append((sim.score(piece, view)[0], node))
        best = sim.break_ties(scored)
        if best is None:
            sim.random = random  # an attempt that fails leaves nothing behind
            return []
        mine.append((best, piece, begin, end))
    return mine


def _least_free(node: Node, planned: list[Planned], begin: float, end: float) -> SimpleNamespace:
    """The node with the least that is free of it between two times."""
    here = [(piece, since, until) for on, piece, since, until in planned if on is node]
    times = [begin, *(since for _, since, _ in here if begin < since < end)]
    present = [[piece for piece, since, until in here if since <= time < until] for time in times]
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


def _fits(view: SimpleNamespace, piece: Piece) -> bool:
    return (
        view.free_gpus >= piece.gpus
        and bool(piece.types >> view.gpu_type & 1)
        and (view.gpu_memory < 0 or view.gpu_memory >= piece.gpu_memory)
        and (view.cpu < 0 or view.free_cpu >= piece.cpu)
        and (view.memory < 0 or view.free_memory >= piece.memory)
    )
