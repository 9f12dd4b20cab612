"""Orders that preempt: they stop running jobs for waiting ones. The compiled form is ``engine/preemption_loop.py``.

Waiting jobs are tried in the queue's order. A piece goes on free GPUs where the placement finds some; otherwise it
evicts jobs that come after its own job: on the node where the most important victim is the least important, one victim
after another from the least important, until it fits. A victim without which a gang fits on what the other victims leave is
spared, the most important first. Victims that still fit where they were are reprieved at once. The others are tried once more
at their position in the queue, whether they fit where they were after all; if not, they are preempted: after the pass they
wait again, and there is another pass at the same time.

With a placement that looks at topology, a gang for which nothing is free preempts in the domain or rack where the most
important victim is the least important, or anywhere where that costs less and no rack is required.

Where single GPUs are tracked, a job that goes on keeps its very GPUs: the job that evicted it takes others of the same
nodes if enough are left.
"""

import copy
import dataclasses
import math
from collections.abc import Callable

from weft.cluster.model import WHOLE
from weft.cluster.order import FALLING, FIXED, FREE, RUNNING_FIRST, Preemption
from weft.cluster.reference.model import Job, Node, Piece, arguments_of
from weft.cluster.reference.state import State

BY_ROUNDS = Preemption(lambda job, remaining, served: 0.0, FIXED)  # of an order that decides in rounds
Key = tuple[float, int]  # a priority key, and the number of a job


@dataclasses.dataclass
class KeyInputs:
    """A job as the key function of an order sees it."""

    submit: float
    estimate: float
    gpus: float
    priority: float
    level: int
    sequence: float


def key(sim: State, job: Job, remaining: float, served: float) -> float:
    if sim.order.rounds:
        return job.priority_key  # as the policy ranked it
    row = job.row
    inputs = KeyInputs(job.submit, row.estimate[0], gpus(job), row.priority[0], job.level, job.sequence)
    arguments = (inputs, remaining, served, sim.known_to_order)
    found = float(rules(sim).key(*arguments[: arguments_of(rules(sim).key)]))
    if math.isnan(found):
        raise ValueError(f"the key of job {job.id!r} at {sim.now:g} s is nan; expected a number")
    return found


def gpus(job: Job) -> float:
    return job.milli_gpus / WHOLE


def rules(sim: State) -> Preemption:
    return sim.order.preemption or BY_ROUNDS


# ---- priority keys ---------------------------------------------------------------------------------------------------


def arrive(sim: State, job: Job) -> None:
    give_sequence(sim, job)
    job.priority_key = key(sim, job, job.remaining, 0.0)


def give_sequence(sim: State, job: Job, last: bool = True) -> None:
    """The last sequence number of its level, or the first among waiting jobs."""
    if last:
        sim.last_sequence += 1
    else:
        sim.first_sequence -= 1
    sequence = sim.last_sequence if last else sim.first_sequence
    job.sequence = sequence - RUNNING_FIRST if job.runs_in_level else sequence


def waiting_key(sim: State, job: Job) -> Key:
    """Of a waiting job, to be compared with the keys of running ones."""
    return (job.priority_key + sim.now if rules(sim).drift == FALLING else job.priority_key), job.number


def running_key(sim: State, job: Job) -> Key:
    """Of a running job. It is written so that it stays the same as time passes, or is computed for this time."""
    return (current_key(sim, job) if rules(sim).drift == FREE else job.priority_key), job.number


def current_key(sim: State, job: Job) -> float:
    ran = sim.now - job.last_start
    found = key(sim, job, job.remaining + job.restart - ran, job.served + ran)
    return found + sim.now if rules(sim).drift == FALLING else found


def may_preempt(sim: State, waiting: Key, running: Key) -> bool:
    """Whether a running job comes so far after a waiting one that it may be preempted for it."""
    return running > waiting if rules(sim).equals else running[0] > waiting[0]


def in_eviction_order(sim: State, node: Node) -> list[Job]:
    """Jobs on a node, the least important first."""
    there = {id(sim.jobs[name]): sim.jobs[name] for name, _, _ in node.pieces if sim.jobs[name].state == "running"}
    return sorted(there.values(), key=lambda job: running_key(sim, job), reverse=True)


def preemption_cost(sim: State, node: Node, piece: Piece) -> Key:
    """The most important job that the node must evict for a piece: inf for none, -inf where evicting does not help."""
    bare, worst = copy.copy(node), (math.inf, -1)
    bare.pieces, bare.milli = list(node.pieces), list(node.milli)
    for job in in_eviction_order(sim, node):
        if bare.fits(piece):
            break
        for name, taken, on in [one for one in bare.pieces if one[0] == job.id]:
            bare.give_back(taken, name, on)
        worst = running_key(sim, job)
    return worst if bare.fits(piece) else (-math.inf, -1)


# ---- passes over the queue -------------------------------------------------------------------------------------------


def start_waiting(sim: State, demoted: list[Job]) -> None:
    """Passes over the queue until none preempts any more; ``demoted`` jobs came to another level at this time."""
    while one_pass(sim, demoted):
        demoted = []


def one_pass(sim: State, demoted: list[Job]) -> bool:
    """Tries every waiting job once; says whether any job was preempted."""
    tried: set[int] = set()
    evicted: list[Job] = []
    while waiting := [job for job in (*sim.queue, *evicted) if job.number not in tried]:
        job = min(waiting, key=lambda j: (j.priority_key, j.number))
        tried.add(job.number)
        if job.state == "evicted":
            if put_back(sim, job):  # as if nothing had happened to it
                job.priority_key = current_key(sim, job)
                evicted.remove(job)
            continue
        victims = place(sim, job)
        if victims is None:
            continue
        start(sim, job)
        for victim in victims:  # is tried once more in this pass, at its position in the queue
            place_in_queue = running_key(sim, victim)[0]
            victim.priority_key = place_in_queue - sim.now if rules(sim).drift == FALLING else place_in_queue
            evicted.append(victim)
    for job in sorted(demoted, key=lambda j: (j.priority_key, j.number)):
        if job.state == "running" and not job.runs_in_level:
            join_running(sim, job)
    # The most important last: each takes the first sequence number of those that wait.
    for job in sorted(evicted, key=lambda j: (j.priority_key, j.number), reverse=True):
        stop(sim, job)
        requeue(sim, job)
    return bool(evicted)


def place(sim: State, job: Job) -> list[Job] | None:
    """Places all pieces of a job; the jobs that it evicted and that do not fit where they were; None where it does not
    fit."""
    pieces, nodes = sim.pieces(job.row), sim.nodes
    if not enough_gpus(sim, job):
        return None
    if sim.placement.topology:
        if sim.place(job):
            return []
        if len(pieces) > 1:
            nodes = cheapest_part(sim, job, pieces)
    evicted = place_on(sim, job, pieces, nodes)
    if evicted is None:
        return None
    ordered = spare(sim, job, pieces, nodes, sorted(evicted, key=lambda victim: running_key(sim, victim)))
    return [victim for victim in ordered if not put_back(sim, victim) and not exchange_gpus(sim, job, victim)]


def cheapest_part(sim: State, job: Job, pieces: list[Piece]) -> list[Node]:
    """The domain, rack or (if no rack is required) whole cluster where the most important victim is the least
    important, the first where equal; empty where evicting does not help."""
    cheapest: list[Node] = []
    least = -math.inf
    for nodes in sim.parts():
        random = sim.random
        evicted = place_on(sim, job, pieces, nodes)
        if evicted is None:
            continue
        most_important = min((running_key(sim, victim)[0] for victim in evicted), default=math.inf)
        roll_back(sim, job, evicted, random)
        if most_important > least:
            cheapest, least = nodes, most_important
    return cheapest


def place_on(sim: State, job: Job, pieces: list[Piece], nodes: list[Node]) -> list[Job] | None:
    """Places all pieces of a job on these nodes; the jobs that it evicted; None, and nothing changed, where it does not
    fit."""
    limit, random = waiting_key(sim, job), sim.random
    if not job.row.pods[0] and len(pieces) > 1:
        alike = sum(p == pieces[0] for p in pieces)
        for piece, least in ((pieces[0], alike), (pieces[-1], len(pieces))):
            if sum(may_preempt(sim, limit, preemption_cost(sim, node, piece)) for node in nodes) < least:
                return None
    evicted: list[Job] = []
    job.placed = []
    for piece in pieces:
        node = sim.choose(piece, nodes)
        if node is None:
            costs = [(preemption_cost(sim, n, piece), -i, n) for i, n in enumerate(nodes)]
            able = [(cost[0], i, n) for cost, i, n in costs if may_preempt(sim, limit, cost)]
            if not able:
                roll_back(sim, job, evicted, random)
                return None
            node = max(able, key=lambda each: each[:2])[2]
            while not node.fits(piece):
                victim = in_eviction_order(sim, node)[0]
                victim.release()
                victim.state = "evicted"
                evicted.append(victim)
        on = sim.pick(node, piece)
        node.take(piece, job.id, on)
        job.placed.append((node, piece, on))
    return evicted


def spare(sim: State, job: Job, pieces: list[Piece], nodes: list[Node], evicted: list[Job]) -> list[Job]:
    """The victims of a gang that are needed, the most important first: a later one may leave nodes for all its pieces."""
    if len(pieces) < 2 or len(evicted) < 2:
        return evicted
    return [victim for victim in evicted if not goes_on(sim, job, victim, lambda piece, _: sim.choose(piece, nodes))]


def goes_on(sim: State, job: Job, victim: Job, choose: Callable[[Piece, Node], Node | None]) -> bool:
    """Whether an evicted job goes on where it was while the job that evicted it takes, for each piece on a node, the one that
    ``choose`` gives; if not, nothing has changed."""
    placed, random = job.placed, sim.random
    job.release()
    if put_back(sim, victim):
        job.placed = []
        for node, piece, _ in placed:
            if (other := choose(piece, node)) is None:
                break
            on = sim.pick(other, piece)
            other.take(piece, job.id, on)
            job.placed.append((other, piece, on))
        if len(job.placed) == len(placed):
            return True
        job.release()
        victim.release()
        victim.state = "evicted"
    for node, piece, on in placed:
        node.take(piece, job.id, on)
    job.placed, sim.random = placed, random
    return False


def roll_back(sim: State, job: Job, evicted: list[Job], random: int) -> None:
    """An attempt leaves nothing behind."""
    job.release()
    for victim in evicted:
        put_back(sim, victim)
    job.placed, sim.random = [], random


def enough_gpus(sim: State, job: Job) -> bool:
    """Whether there are as many GPUs, free or held by jobs that may be preempted; most attempts end here."""
    limit = waiting_key(sim, job)
    held = sum(other.milli_gpus for other in sim.running if may_preempt(sim, limit, running_key(sim, other)))
    return sum(sum(node.milli) for node in sim.nodes) + held >= job.milli_gpus


def put_back(sim: State, victim: Job) -> bool:
    """Gives an evicted job its nodes again if it fits on all of them, on its own GPUs where single ones are tracked."""
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


def exchange_gpus(sim: State, job: Job, victim: Job) -> bool:
    """Whether an evicted job has its own GPUs again when the job that evicted it takes others of the same nodes."""
    return sim.detailed and goes_on(sim, job, victim, lambda piece, node: node if node.fits(piece) else None)


# ---- starting and stopping -------------------------------------------------------------------------------------------


def start(sim: State, job: Job) -> None:
    job.restart = sim.restart_s if job.stops else 0.0
    sim.queue.remove(job)
    job.start = sim.now if job.start is None else job.start
    job.last_start, job.end = sim.now, sim.now + (job.restart + job.work)
    sim.record(job, "running")
    join_running(sim, job)
    job.demotion = next_demotion(sim, job)


def join_running(sim: State, job: Job) -> None:
    """A running job takes its sequence number among the running ones, and its key."""
    if not job.runs_in_level:
        job.runs_in_level = True
        give_sequence(sim, job)
    job.priority_key = current_key(sim, job)


def next_demotion(sim: State, job: Job) -> float:
    """When a running job comes to the next level."""
    weight = gpus(job) if rules(sim).by_gpus else 1.0
    if job.level >= len(rules(sim).levels) or weight <= 0:
        return math.inf
    return job.last_start + (rules(sim).levels[job.level] / weight - job.served)


def demote(sim: State, job: Job) -> None:
    """A running job comes to the next level, and is after all that wait there until the passes are over."""
    job.level += 1
    job.runs_in_level = False
    give_sequence(sim, job)
    job.priority_key = current_key(sim, job)
    job.demotion = next_demotion(sim, job)
    sim.history.append((sim.now, "level", job.id))


def stop(sim: State, job: Job) -> None:
    """Preempts a job: it keeps its work up to the last checkpoint, and waits again."""
    ran = sim.now - job.last_start
    done = max(ran - job.restart, 0.0)
    kept = done if sim.checkpoint_s <= 0 else min(math.floor(done / sim.checkpoint_s) * sim.checkpoint_s, done)
    on = [sum(1 << gpu for gpu in gpus) for _, _, gpus in job.placed]
    job.stretches.append((job.last_start, sim.now, [node.id for node, _, _ in job.placed], on))
    job.lost += ran - kept
    job.served += ran
    job.work -= kept
    job.remaining -= kept
    job.stops += 1
    job.placed, job.end, job.demotion = [], None, math.inf
    sim.queue.append(job)
    sim.record(job, "stopped")


def requeue(sim: State, job: Job) -> None:
    """A preempted job takes its sequence number, and its key."""
    if job.runs_in_level:
        job.runs_in_level = False
        give_sequence(sim, job, last=False)
    weight, level = gpus(job) if rules(sim).by_gpus else 1.0, job.level
    while job.level < len(rules(sim).levels) and job.served * weight >= rules(sim).levels[job.level]:
        job.level += 1
    if job.level > level:
        give_sequence(sim, job)
    job.priority_key = key(sim, job, job.remaining + sim.restart_s, job.served)
