"""Room for a waiting job, on what is free or in place of jobs that stand after it."""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.index import choose
from weft.cluster.engine.node import DETAILED, RANDOM_STATE, fits, fits_on, pick, take
from weft.cluster.engine.promise import changed, leave
from weft.cluster.engine.standing import sort_by_key, standing_at, wanted
from weft.cluster.engine.topology import choose_among
from weft.cluster.engine.yields import best_yield, best_yield_among, refresh_yields, sit, yielding


@compiled
def give_up(nodes, pieces, log, meta, room, classes, places, where, jobs, j, count):
    """Gives back the first so many pieces of a job."""
    c, slot = jobs[j].cls, jobs[j].slot
    for i in range(count):
        p = classes[c].piece if i < classes[c].count else classes[c].rest
        take(nodes, pieces, log, meta, room, where[slot + i], p, places[slot + i].gpus, -1)


@compiled
def lift(nodes, pieces, log, meta, room, classes, first, places, where, jobs, j):
    """Takes a running job off its nodes."""
    c = jobs[j].cls
    count = classes[c].count + (classes[c].rest >= 0)
    leave(first, places, where, jobs[j].slot, count)
    give_up(nodes, pieces, log, meta, room, classes, places, where, jobs, j, count)


@compiled
def seat(log, meta, classes, first, places, where, jobs, rules, j, now):
    """Enters a job that runs in the lists of its nodes."""
    c, slot = jobs[j].cls, jobs[j].slot
    standing = standing_at(jobs, j, rules, now)
    for i in range(slot, slot + classes[c].count + (classes[c].rest >= 0)):
        places[i].job, places[i].standing = j, standing
        places[i].piece = classes[c].piece if i < slot + classes[c].count else classes[c].rest
        changed(log, meta, where[i])
        sit(first, places, where[i], i)


@compiled
def reseat(log, meta, classes, first, places, where, jobs, rules, j, now):
    """Sorts a job that runs, and stands elsewhere now, into the lists of its nodes."""
    leave(first, places, where, jobs[j].slot, classes[jobs[j].cls].count + (classes[jobs[j].cls].rest >= 0))
    seat(log, meta, classes, first, places, where, jobs, rules, j, now)


@compiled
def put_back(nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, j, now):
    """Gives a lifted job its nodes again if all of them still have room, on its GPUs where single ones are looked at."""
    c, slot = jobs[j].cls, jobs[j].slot
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    for i in range(count + (rest >= 0)):
        n, p = where[slot + i], piece if i < count else rest
        gpus = places[slot + i].gpus
        if not fits(nodes[n], pieces[p]) or (meta[DETAILED] and not fits_on(nodes[n], pieces[p], gpus)):
            give_up(nodes, pieces, log, meta, room, classes, places, where, jobs, j, i)
            return False
        take(nodes, pieces, log, meta, room, n, p, gpus, 1)
    seat(log, meta, classes, first, places, where, jobs, rules, j, now)
    return True


@compiled
def make_way(nodes, pieces, log, meta, context, room, classes, first, places, where, jobs, rules, j, victim, now):
    """Whether a lifted job has its GPUs again when job j, which it was lifted for, takes others of its nodes."""
    c, slot, random = jobs[j].cls, jobs[j].slot, meta[RANDOM_STATE]
    count = classes[c].count + (classes[c].rest >= 0)
    for i in range(count):
        places[slot + i].before = places[slot + i].gpus
    give_up(nodes, pieces, log, meta, room, classes, places, where, jobs, j, count)
    if put_back(nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, victim, now):
        placed = 0
        for i in range(count):
            n, p = where[slot + i], classes[c].piece if i < classes[c].count else classes[c].rest
            if not fits(nodes[n], pieces[p]):
                break
            places[slot + i].gpus = pick(nodes[n], pieces[p], context, meta)
            take(nodes, pieces, log, meta, room, n, p, places[slot + i].gpus, 1)
            placed += 1
        if placed == count:
            return True
        give_up(nodes, pieces, log, meta, room, classes, places, where, jobs, j, placed)
        lift(nodes, pieces, log, meta, room, classes, first, places, where, jobs, victim)
    for i in range(count):
        p = classes[c].piece if i < classes[c].count else classes[c].rest
        places[slot + i].gpus = places[slot + i].before
        take(nodes, pieces, log, meta, room, where[slot + i], p, places[slot + i].gpus, 1)
    meta[RANDOM_STATE] = random
    return False


@compiled
def reprieve(
    nodes, pieces, log, meta, context, room, classes, first, places, where, jobs, rules, stopped, lifted, j, now
):  # fmt: skip
    """Puts those who were lifted for job j back where they still fit, the most important first: how many remain in
    ``stopped``."""
    for k in range(lifted):
        jobs[stopped[k]].key = standing_at(jobs, stopped[k], rules, now)
    sort_by_key(jobs, stopped, lifted)
    remain = 0
    for k in range(lifted):
        job = stopped[k]
        if put_back(nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, job, now):
            continue
        if meta[DETAILED] and make_way(
            nodes, pieces, log, meta, context, room, classes, first, places, where, jobs, rules, j, job, now
        ):
            continue
        stopped[remain] = job
        remain += 1
    return remain


@compiled
def make_room(
    nodes, pieces, best, ways, levels, log, meta, context, room, classes, tree, read, asked, first, places, sorted_at, where,
    jobs, rules, stopped, j, begin, end, trial, now,
):  # fmt: skip
    """Allocates all pieces of a waiting job: how many jobs lost their nodes by it, who are then in ``stopped``; -1 where it is
    not possible, and nothing has changed then. Anywhere, or if ``end`` is not 0 on the nodes from ``begin`` to there in the
    order of racks. A ``trial`` changes nothing, and says who would be the most important to be lifted; ``len(jobs)``: nobody.
    """
    c, slot, limit = jobs[j].cls, jobs[j].slot, wanted(jobs, j, rules, now)
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    if end == 0 and not classes[c].shared and count + (rest >= 0) > 1:
        for p, least in ((piece, count), (rest, count + 1)):
            if p < 0:
                continue
            refresh_yields(
                nodes, pieces, tree, read, asked, ways, levels, log, first, places, sorted_at, jobs, rules, meta, p, now
            )
            able = yielding(nodes, pieces, tree, levels, first, places, sorted_at, jobs, rules, p, limit, j, now, least)
            if able[0] < least:
                return -1
    lifted = placed = 0
    random = meta[RANDOM_STATE]
    for i in range(count + (rest >= 0)):
        p = piece if i < count else rest
        if end:
            n = choose_among(nodes, pieces, meta, context, p, begin, end)
        else:
            n = choose(nodes, pieces, best, ways, levels, log, meta, context, p)
        if n < 0:
            refresh_yields(
                nodes, pieces, tree, read, asked, ways, levels, log, first, places, sorted_at, jobs, rules, meta, p, now
            )
            if end:
                n = best_yield_among(
                    nodes, pieces, tree, first, places, sorted_at, jobs, rules, p, limit, j, now, begin, end
                )
            else:
                n = best_yield(nodes, pieces, tree, levels, first, places, sorted_at, jobs, rules, p, limit, j, now)
            if n < 0:
                break
            while not fits(nodes[n], pieces[p]):
                stopped[lifted] = places[first[n]].job
                lift(nodes, pieces, log, meta, room, classes, first, places, where, jobs, stopped[lifted])
                lifted += 1
        if meta[DETAILED]:
            places[slot + i].gpus = pick(nodes[n], pieces[p], context, meta)
        take(nodes, pieces, log, meta, room, n, p, places[slot + i].gpus, 1)
        where[slot + i] = n
        placed += 1
    able_to = placed == count + (rest >= 0)
    if able_to and not trial:
        if not lifted:
            return 0
        return reprieve(
            nodes, pieces, log, meta, context, room, classes, first, places, where, jobs, rules, stopped, lifted, j, now
        )
    give_up(nodes, pieces, log, meta, room, classes, places, where, jobs, j, placed)
    victim, standing = len(jobs), np.inf
    for k in range(lifted):
        put_back(nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, stopped[k], now)
        if standing_at(jobs, stopped[k], rules, now) < standing:
            victim, standing = stopped[k], standing_at(jobs, stopped[k], rules, now)
    meta[RANDOM_STATE] = random  # an attempt that fails leaves nothing behind
    return victim if able_to else -1
