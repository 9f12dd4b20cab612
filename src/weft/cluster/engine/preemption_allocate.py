"""The nodes of a waiting job, on what is free or in place of jobs that come after it."""

import numpy as np

from weft.cluster.engine.allocate import kind_of, pieces_of, place
from weft.cluster.engine.compiled import compiled, inlined
from weft.cluster.engine.easy_reservation import leave
from weft.cluster.engine.index import choose
from weft.cluster.engine.node import DETAILED, RANDOM_STATE, TOPOLOGY, fits, fits_on, log_change, pick, take
from weft.cluster.engine.preemption_cost import (
    cheapest_node,
    cheapest_node_among,
    count_nodes,
    insert,
    refresh_costs,
)
from weft.cluster.engine.preemption_keys import running_key, sort_by_key, waiting_key
from weft.cluster.engine.topology import choose_among
from weft.cluster.engine.tree import NEVER
from weft.cluster.placement import REQUIRED

DOMAIN, RACK, ANYWHERE = range(3)


@inlined
def give_back(s, q, j, count):
    """Gives back the first so many pieces of a job."""
    c, slot = q.jobs[j].cls, q.jobs[j].slot
    for i in range(count):
        take(s, s.where[slot + i], kind_of(s.classes, c, i), q.placed[slot + i].gpus, -1)


@inlined
def evict(s, q, j):
    """Takes a running job off its nodes."""
    count = pieces_of(s.classes, q.jobs[j].cls)
    leave(q.first, q.placed, s.where, q.jobs[j].slot, count)
    give_back(s, q, j, count)


@inlined
def enter(s, q, j, now):
    """Enters a running job in the lists of its nodes."""
    c, slot = q.jobs[j].cls, q.jobs[j].slot
    key = running_key(q, j, now)
    for i in range(slot, slot + pieces_of(s.classes, c)):
        q.placed[i].job, q.placed[i].key = j, key
        q.placed[i].piece = kind_of(s.classes, c, i - slot)
        log_change(s, s.where[i])
        insert(q, s.where[i], i)


@compiled
def re_enter(s, q, j, now):
    """Sorts a running job whose key has changed into the lists of its nodes."""
    leave(q.first, q.placed, s.where, q.jobs[j].slot, pieces_of(s.classes, q.jobs[j].cls))
    enter(s, q, j, now)


@inlined
def put_back(s, q, j, now):
    """Gives an evicted job its nodes again if it fits on all of them, on its own GPUs where single ones are tracked."""
    c, slot = q.jobs[j].cls, q.jobs[j].slot
    for i in range(pieces_of(s.classes, c)):
        n, p = s.where[slot + i], kind_of(s.classes, c, i)
        gpus = q.placed[slot + i].gpus
        if not fits(s.nodes[n], s.pieces[p]) or (s.meta[DETAILED] and not fits_on(s.nodes[n], s.pieces[p], gpus)):
            give_back(s, q, j, i)
            return False
        take(s, n, p, gpus, 1)
    enter(s, q, j, now)
    return True


@compiled
def exchange_gpus(s, q, j, victim, now):
    """Whether an evicted job has its own GPUs again when job j, which evicted it, takes others of the same nodes."""
    placed, c, slot, random = q.placed, q.jobs[j].cls, q.jobs[j].slot, s.meta[RANDOM_STATE]
    count = pieces_of(s.classes, c)
    for i in range(count):
        placed[slot + i].before = placed[slot + i].gpus
    give_back(s, q, j, count)
    if put_back(s, q, victim, now):
        done = 0
        for i in range(count):
            n, p = s.where[slot + i], kind_of(s.classes, c, i)
            if not fits(s.nodes[n], s.pieces[p]):
                break
            placed[slot + i].gpus = pick(s, n, p)
            take(s, n, p, placed[slot + i].gpus, 1)
            done += 1
        if done == count:
            return True
        give_back(s, q, j, done)
        evict(s, q, victim)
    for i in range(count):
        placed[slot + i].gpus = placed[slot + i].before
        take(s, s.where[slot + i], kind_of(s.classes, c, i), placed[slot + i].gpus, 1)
    s.meta[RANDOM_STATE] = random
    return False


@compiled
def spare(s, q, j, count, begin, end, now):
    """Spares victims of gang j, the most important first, without which it fits on what the others leave; how many are needed,
    which are in ``victims`` in that order."""
    for k in range(count):
        q.jobs[q.victims[k]].key = running_key(q, q.victims[k], now)
    sort_by_key(q.jobs, q.victims, count)
    c, slot = q.jobs[j].cls, q.jobs[j].slot
    total = pieces_of(s.classes, c)
    if total < 2 or count < 2:
        return count
    needed = 0
    for k in range(count):
        victim, random, fitted = q.victims[k], s.meta[RANDOM_STATE], False
        for i in range(slot, slot + total):
            q.placed[i].before, q.placed[i].node_before = q.placed[i].gpus, s.where[i]
        give_back(s, q, j, total)
        if put_back(s, q, victim, now):
            done = 0
            for i in range(total):
                p = kind_of(s.classes, c, i)
                n = choose_among(s, p, begin, end) if end else choose(s, p)
                if n < 0:
                    break
                if s.meta[DETAILED]:
                    q.placed[slot + i].gpus = pick(s, n, p)
                take(s, n, p, q.placed[slot + i].gpus, 1)
                s.where[slot + i] = n
                done += 1
            fitted = done == total
            if not fitted:
                give_back(s, q, j, done)
                evict(s, q, victim)
        if fitted:
            continue
        for i in range(slot, slot + total):
            s.where[i], q.placed[i].gpus = q.placed[i].node_before, q.placed[i].before
            take(s, s.where[i], kind_of(s.classes, c, i - slot), q.placed[i].gpus, 1)
        s.meta[RANDOM_STATE] = random
        q.victims[needed] = victim
        needed += 1
    return needed


@inlined
def reprieve(s, q, count, j, now):
    """Puts victims of job j back where they still fit, the most important first: how many remain in ``victims``."""
    remain = 0
    for k in range(count):
        job = q.victims[k]
        if put_back(s, q, job, now):
            continue
        if s.meta[DETAILED] and exchange_gpus(s, q, j, job, now):
            continue
        q.victims[remain] = job
        remain += 1
    return remain


@compiled
def allocate(s, q, j, begin, end, trial, now):
    """Allocates all pieces of a waiting job: how many jobs lost their nodes by it, which are then in ``victims``; -1
    where it is not possible, and nothing has changed then. Anywhere, or if ``end`` is not 0 on the nodes from ``begin``
    to there in the order of racks. A ``trial`` changes nothing, and returns the most important victim; ``len(jobs)``:
    none."""
    jobs, meta, c, slot, limit = q.jobs, s.meta, q.jobs[j].cls, q.jobs[j].slot, waiting_key(q, j, now)
    piece, count, rest = s.classes[c].piece, s.classes[c].count, s.classes[c].rest
    total = count + (rest >= 0)
    if end == 0 and not s.classes[c].shared and total > 1:
        for p, least in ((piece, count), (rest, count + 1)):
            if p < 0:
                continue
            refresh_costs(s, q, p, now)
            if count_nodes(s, q, p, limit, j, now, least)[0] < least:
                return -1
    evicted = done = 0
    random = meta[RANDOM_STATE]
    for i in range(total):
        p = piece if i < count else rest
        n = choose_among(s, p, begin, end) if end else choose(s, p)
        if n < 0:
            refresh_costs(s, q, p, now)
            if end:
                n = cheapest_node_among(s, q, p, limit, j, now, begin, end)
            else:
                n = cheapest_node(s, q, p, limit, j, now)
            if n < 0:
                break
            while not fits(s.nodes[n], s.pieces[p]):
                q.victims[evicted] = q.placed[q.first[n]].job
                evict(s, q, q.victims[evicted])
                evicted += 1
        if meta[DETAILED]:
            q.placed[slot + i].gpus = pick(s, n, p)
        take(s, n, p, q.placed[slot + i].gpus, 1)
        s.where[slot + i] = n
        done += 1
    able = done == total
    if able and not trial:
        if not evicted:
            return 0
        return reprieve(s, q, spare(s, q, j, evicted, begin, end, now), j, now)
    give_back(s, q, j, done)
    victim, key = len(jobs), np.inf
    for k in range(evicted):
        put_back(s, q, q.victims[k], now)
        if running_key(q, q.victims[k], now) < key:
            victim, key = q.victims[k], running_key(q, q.victims[k], now)
    meta[RANDOM_STATE] = random  # an attempt that fails leaves nothing behind
    return victim if able else -1


# ---- with a placement that looks at topology -------------------------------------------------------------------------


@compiled
def allocate_near(s, q, j, now):
    """As :func:`allocate`, in the domain or rack where the most important victim is the least important
    (``weft.cluster.reference.preemption.cheapest_part`` is the plain form). A domain or a rack is tried only if enough
    of its nodes have less important victims than those before."""
    c, slot, limit = q.jobs[j].cls, q.jobs[j].slot, waiting_key(q, j, now)
    piece, count, rest = s.classes[c].piece, s.classes[c].count, s.classes[c].rest
    if place(s, c, slot):
        for i in range(slot, slot + count + (rest >= 0) if s.meta[DETAILED] else slot):
            q.placed[i].gpus = s.on[i]
        return 0
    begin, end, least = np.int64(0), np.int64(0), NEVER
    if count > 1 or rest >= 0:
        for kind in range(ANYWHERE if s.meta[TOPOLOGY] == REQUIRED else ANYWHERE + 1):
            at = np.int64(0)
            while at < len(s.nodes):
                until = end_of(s.nodes, at, kind)
                for p in (piece, rest):
                    if p >= 0:
                        refresh_costs(s, q, p, now)
                if may_be_cheaper(s, q, c, at, until, limit, least):
                    victim = allocate(s, q, j, at, until, True, now)
                    if victim >= 0:
                        key = running_key(q, victim, now) if victim < len(q.jobs) else np.inf
                        if key > least:
                            begin, end, least = at, until, key
                at = until
        if end == 0:
            return -1
    return allocate(s, q, j, begin, end, False, now)


@compiled
def end_of(nodes, at, kind):
    """Where the domain or the rack ends that begins at a position in the order of racks."""
    if kind == ANYWHERE:
        return np.int64(len(nodes))
    node = nodes[nodes[at].member]
    return np.int64(nodes[node.domain].domain_end if kind == DOMAIN else nodes[node.rack].rack_end)


@compiled
def may_be_cheaper(s, q, c, begin, end, limit, least):
    """Whether as many of these nodes as a job of class c needs at least have victims less important than ``least``."""
    piece, count, rest = s.classes[c].piece, s.classes[c].count, s.classes[c].rest
    whole = other = 0
    for k in range(begin, end):
        n = s.nodes[k].member
        whole += q.costs[piece, n] >= limit and q.costs[piece, n] > least
        if rest >= 0:
            other += q.costs[rest, n] >= limit and q.costs[rest, n] > least
    return whole >= (1 if s.classes[c].shared else count) and (rest < 0 or other > count)
