"""Orders that stop running jobs, in the plainest form (``engine/preempt.py`` is the compiled one).

Who waits is asked in the queue's order. A piece takes free room where there is any, by the placement; otherwise room of jobs
that stand after its own job: on the node whose most important victim is the least important, one after the other from the
least important, until it fits. Whoever of them still has room where it was, goes on; the others are asked once more where they
stood in the queue, whether they can go on there after all. Who cannot was stopped: after the round it waits again, and there is
another round at the same moment.

Where single GPUs are looked at, who goes on has its very GPUs: the job that it made room for takes others of the same nodes, if
that leaves it enough.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from typing import TYPE_CHECKING

from weft.cluster import topology
from weft.cluster.model import WHOLE
from weft.cluster.order import FALLING, FIXED, FREE, SETTLED, Preemption
from weft.cluster.parts import Job, Node, Piece

if TYPE_CHECKING:
    from weft.cluster.reference import Simulator

IN_ROUNDS = Preemption(lambda job, left, served: 0.0, FIXED)  # of a policy that decides in rounds
Place = tuple[float, int]  # a key or standing, and the number of a job


@dataclasses.dataclass
class Seen:
    """A job as the key of an order sees it."""

    submit: float
    estimate: float
    gpus: float
    priority: float
    level: int
    turn: float


def key(sim: Simulator, job: Job, left: float, served: float) -> float:
    if sim.order.rounds:
        return job.rank  # as the policy has it
    row = job.row
    seen = Seen(job.submit, row.estimate[0], gpus(job), row.priority[0], job.level, job.turn)
    given = (seen, left, served, sim.known_to_order)
    return float(rules(sim).key(*given[: len(inspect.signature(rules(sim).key).parameters)]))


def gpus(job: Job) -> float:
    return float(job.row.gpus[0] * job.row.milli[0] / WHOLE)


def rules(sim: Simulator) -> Preemption:
    return sim.order.preemption or IN_ROUNDS


# ---- who stands where ------------------------------------------------------------------------------------------------


def arrive(sim: Simulator, job: Job) -> None:
    take_turn(sim, job)
    job.rank = key(sim, job, job.left, 0.0)


def take_turn(sim: Simulator, job: Job, last: bool = True) -> None:
    """The last turn of its level, or the first of those who wait."""
    if last:
        sim.last_turn += 1
    else:
        sim.first_turn -= 1
    turn = sim.last_turn if last else sim.first_turn
    job.turn = turn - SETTLED if job.settled else turn


def wanted(sim: Simulator, job: Job) -> Place:
    """What the standing of a waiting job is to be compared with."""
    return (job.rank + sim.now if rules(sim).drift == FALLING else job.rank), job.number


def standing(sim: Simulator, job: Job) -> Place:
    """Of a running job. It stays the same while time passes, or is worked out for this moment."""
    return (standing_anew(sim, job) if rules(sim).drift == FREE else job.rank), job.number


def standing_anew(sim: Simulator, job: Job) -> float:
    ran = sim.now - job.begins
    found = key(sim, job, job.left + job.resume - ran, job.served + ran)
    return found + sim.now if rules(sim).drift == FALLING else found


def after(sim: Simulator, place: Place, limit: Place) -> bool:
    """Whether a running job stands so far after a waiting one that it may be stopped for it."""
    return place > limit if rules(sim).equals else place[0] > limit[0]


def residents(sim: Simulator, node: Node) -> list[Job]:
    """Jobs on a node, the least important first."""
    there = {id(sim.jobs[name]): sim.jobs[name] for name, _, _ in node.pieces if sim.jobs[name].state == "running"}
    return sorted(there.values(), key=lambda job: standing(sim, job), reverse=True)


def yields(sim: Simulator, node: Node, piece: Piece) -> Place:
    """The most important job that the node must stop for a piece: inf for none, -inf where nothing helps."""
    bare, worst = copy.copy(node), (math.inf, -1)
    bare.pieces, bare.milli = list(node.pieces), list(node.milli)
    for job in residents(sim, node):
        if bare.fits(piece):
            break
        for name, taken, on in [one for one in bare.pieces if one[0] == job.id]:
            bare.give_back(taken, name, on)
        worst = standing(sim, job)
    return worst if bare.fits(piece) else (-math.inf, -1)


# ---- starting and stopping -------------------------------------------------------------------------------------------


def start_in_turn(sim: Simulator, fallen: list[Job]) -> None:
    """Rounds until nobody is stopped any more; ``fallen`` came to another level at this moment."""
    while one_round(sim, fallen):
        fallen = []


def one_round(sim: Simulator, fallen: list[Job]) -> bool:
    """Asks everyone who waits once; says whether anyone was stopped."""
    asked: set[int] = set()
    lifted: list[Job] = []
    while waiting := [job for job in (*sim.queue, *lifted) if job.number not in asked]:
        job = min(waiting, key=lambda j: (j.rank, j.number))
        asked.add(job.number)
        if job.state == "lifted":
            if go_on(sim, job):
                lifted.remove(job)
            continue
        victims = make_room(sim, job)
        if victims is None:
            continue
        begin(sim, job)
        for victim in victims:
            lose_nodes(sim, victim)
            lifted.append(victim)
    for job in sorted(fallen, key=lambda j: (j.rank, j.number)):
        if job.state == "running" and not job.settled:
            settle_down(sim, job)
    for job in sorted(lifted, key=lambda j: (j.rank, j.number), reverse=True):  # the first is to be the very first
        end_stretch(sim, job)
        queue_again(sim, job)
    return bool(lifted)


def make_room(sim: Simulator, job: Job) -> list[Job] | None:
    """Allocates all pieces of a job: who was lifted off its nodes for that; None where it is not possible."""
    pieces, nodes = sim.pieces(job.row), sim.nodes
    if not enough(sim, job, wanted(sim, job)):
        return None
    if sim.placement.topology:
        if sim.place(job):
            return []
        if len(pieces) > 1:
            nodes = least_harm(sim, job, pieces)
    lifted = stop_on(sim, job, pieces, nodes)
    if lifted is None:
        return None
    ordered = sorted(lifted, key=lambda victim: standing(sim, victim))
    return [victim for victim in ordered if not put_back(sim, victim) and not make_way(sim, job, victim)]


def least_harm(sim: Simulator, job: Job, pieces: list[Piece]) -> list[Node]:
    """Of the domains, the racks and (if none is required) all nodes together those nodes where the most important job that
    must be stopped is the least important, the first where equal; nothing where stopping does not help."""
    found: list[Node] = []
    least = -math.inf
    for nodes in topology.parts(sim):
        random = sim.random
        lifted = stop_on(sim, job, pieces, nodes)
        if lifted is None:
            continue
        most_important = min((standing(sim, victim)[0] for victim in lifted), default=math.inf)
        undo(sim, job, lifted, random)
        if most_important > least:
            found, least = nodes, most_important
    return found


def stop_on(sim: Simulator, job: Job, pieces: list[Piece], nodes: list[Node]) -> list[Job] | None:
    """Allocates all pieces of a job on these nodes: who was lifted for that; None where it is not possible, and nothing has
    changed."""
    limit, random = wanted(sim, job), sim.random
    if not job.row.pods[0] and len(pieces) > 1:
        alike = sum(p == pieces[0] for p in pieces)
        for piece, least in ((pieces[0], alike), (pieces[-1], len(pieces))):
            if sum(after(sim, yields(sim, node, piece), limit) for node in nodes) < least:
                return None
    lifted: list[Job] = []
    job.placed = []
    for piece in pieces:
        node = sim.choose(piece, nodes)
        if node is None:
            found = [(yields(sim, n, piece), -i, n) for i, n in enumerate(nodes)]
            able = [(place[0], i, n) for place, i, n in found if after(sim, place, limit)]
            if not able:
                undo(sim, job, lifted, random)
                return None
            node = max(able, key=lambda one: one[:2])[2]
            while not node.fits(piece):
                victim = residents(sim, node)[0]
                take_off(victim)
                victim.state = "lifted"
                lifted.append(victim)
        on = sim.pick(node, piece)
        node.take(piece, job.id, on)
        job.placed.append((node, piece, on))
    return lifted


def undo(sim: Simulator, job: Job, lifted: list[Job], random: int) -> None:
    """An attempt leaves nothing behind."""
    take_off(job)
    for victim in lifted:
        put_back(sim, victim)
    job.placed, sim.random = [], random


def enough(sim: Simulator, job: Job, limit: Place) -> bool:
    """Whether there are as many GPUs, free or held by jobs that may be stopped; most attempts end here."""
    later = [
        other for other in sim.jobs.values() if other.state == "running" and after(sim, standing(sim, other), limit)
    ]
    held = sum(int(other.row.gpus[0] * other.row.milli[0]) for other in later)
    return sum(sum(node.milli) for node in sim.nodes) + held >= int(job.row.gpus[0] * job.row.milli[0])


def take_off(job: Job) -> None:
    for node, piece, on in job.placed:
        node.give_back(piece, job.id, on)


def put_back(sim: Simulator, victim: Job) -> bool:
    """Gives a lifted job its nodes again if all of them still have room, on its GPUs where single ones are looked at."""
    taken: list[tuple[Node, Piece, list[int]]] = []
    for node, piece, on in victim.placed:
        free = [gpu for gpu in range(node.gpus) if node.milli[gpu] >= piece.milli]
        own = all(gpu in free for gpu in on)
        if not node.fits(piece) or (sim.detailed and not own):
            for other, mine, where in taken:
                other.give_back(mine, victim.id, where)
            return False
        on = on if own else free[: piece.gpus]
        node.take(piece, victim.id, on)
        taken.append((node, piece, on))
    victim.placed, victim.state = taken, "running"
    return True


def make_way(sim: Simulator, job: Job, victim: Job) -> bool:
    """Whether a lifted job has its GPUs again when the job that it was lifted for takes others of its nodes."""
    if not sim.detailed:
        return False
    placed, random = job.placed, sim.random
    take_off(job)
    if put_back(sim, victim):
        job.placed = []
        for node, piece, _ in placed:
            if not node.fits(piece):
                break
            on = sim.pick(node, piece)
            node.take(piece, job.id, on)
            job.placed.append((node, piece, on))
        if len(job.placed) == len(placed):
            return True
        take_off(job)
        take_off(victim)
        victim.state = "lifted"
    for node, piece, on in placed:
        node.take(piece, job.id, on)
    job.placed, sim.random = placed, random
    return False


def begin(sim: Simulator, job: Job) -> None:
    job.resume = sim.restart_s if job.stops else 0.0
    sim.queue.remove(job)
    job.start = sim.now if job.start is None else job.start
    job.begins, job.end = sim.now, sim.now + (job.resume + job.work)
    sim.happens(job, "running")
    settle_down(sim, job)
    job.falls = falls(sim, job)


def settle_down(sim: Simulator, job: Job) -> None:
    """A job that runs takes its turn among those that run, and its standing."""
    if not job.settled:
        job.settled = True
        take_turn(sim, job)
    job.rank = standing_anew(sim, job)


def falls(sim: Simulator, job: Job) -> float:
    """When a running job comes to the next level."""
    weight = gpus(job) if rules(sim).by_gpus else 1.0
    if job.level >= len(rules(sim).levels) or weight <= 0:
        return math.inf
    return job.begins + (rules(sim).levels[job.level] / weight - job.served)


def fall(sim: Simulator, job: Job) -> None:
    """A running job comes to the next level, and stands after all who wait there until the round is over."""
    job.level += 1
    job.settled = False
    take_turn(sim, job)
    job.rank = standing_anew(sim, job)
    job.falls = falls(sim, job)
    sim.history.append((sim.now, "level", job.id))


def lose_nodes(sim: Simulator, job: Job) -> None:
    """A lifted job is asked once more in this round, where it stands in the queue."""
    place = standing(sim, job)[0]
    job.rank = place - sim.now if rules(sim).drift == FALLING else place


def go_on(sim: Simulator, job: Job) -> bool:
    """Whether a lifted job finds room where it was: nothing has happened to it then."""
    if not put_back(sim, job):
        return False
    job.rank = standing_anew(sim, job)
    return True


def end_stretch(sim: Simulator, job: Job) -> None:
    """A lifted job was stopped: what it keeps of its work."""
    ran = sim.now - job.begins
    done = max(ran - job.resume, 0.0)
    kept = done if sim.checkpoint_s <= 0 else min(math.floor(done / sim.checkpoint_s) * sim.checkpoint_s, done)
    on = [sum(1 << gpu for gpu in gpus) for _, _, gpus in job.placed]
    job.stretches.append((job.begins, sim.now, [node.id for node, _, _ in job.placed], on))
    job.lost += ran - kept
    job.served += ran
    job.work -= kept
    job.left -= kept
    job.stops += 1
    job.placed, job.end, job.falls = [], None, math.inf
    sim.queue.append(job)
    sim.happens(job, "stopped")


def queue_again(sim: Simulator, job: Job) -> None:
    """Who was stopped takes its turn, and its key."""
    if job.settled:
        job.settled = False
        take_turn(sim, job, last=False)
    weight, level = gpus(job) if rules(sim).by_gpus else 1.0, job.level
    while job.level < len(rules(sim).levels) and job.served * weight >= rules(sim).levels[job.level]:
        job.level += 1
    if job.level > level:
        take_turn(sim, job)
    job.rank = key(sim, job, job.left + sim.restart_s, job.served)
