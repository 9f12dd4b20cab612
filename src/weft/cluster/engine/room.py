"""Room for a waiting job, on what is free or in place of jobs that stand after it."""

from __future__ import annotations

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.index import choose
from weft.cluster.engine.node import RANDOM_STATE, fits, take
from weft.cluster.engine.promise import changed, leave
from weft.cluster.engine.standing import sort_by_key, standing_at, wanted
from weft.cluster.engine.yields import best_yield, refresh_yields, sit, yielding


@compiled
def lift(nodes, pieces, log, meta, room, classes, first, places, where, jobs, j):
    """Takes a running job off its nodes."""
    c, slot = jobs[j].cls, jobs[j].slot
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    leave(first, places, where, slot, count + (rest >= 0))
    for i in range(count + (rest >= 0)):
        take(nodes, pieces, log, meta, room, where[slot + i], piece if i < count else rest, 0, -1)


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
    """Gives a lifted job its nodes again if all of them still have room."""
    c, slot = jobs[j].cls, jobs[j].slot
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    for i in range(count + (rest >= 0)):
        p = piece if i < count else rest
        if not fits(nodes[where[slot + i]], pieces[p]):
            for back in range(i):
                take(nodes, pieces, log, meta, room, where[slot + back], piece, 0, -1)
            return False
        take(nodes, pieces, log, meta, room, where[slot + i], p, 0, 1)
    seat(log, meta, classes, first, places, where, jobs, rules, j, now)
    return True


@compiled
def reprieve(nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, stopped, lifted, now):
    """Puts those who were lifted back where they still fit, the most important first: how many remain in ``stopped``."""
    for k in range(lifted):
        jobs[stopped[k]].key = standing_at(jobs, stopped[k], rules, now)
    sort_by_key(jobs, stopped, lifted)
    remain = 0
    for k in range(lifted):
        job = stopped[k]
        if not put_back(nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, job, now):
            stopped[remain] = job
            remain += 1
    return remain


@compiled
def make_room(
    nodes, pieces, best, ways, levels, log, meta, context, room, classes, tree, read, asked, first, places, sorted_at, where,
    jobs, rules, stopped, j, now,
):  # fmt: skip
    """Allocates all pieces of a waiting job: how many jobs lost their nodes by it, who are then in ``stopped``; -1 where it is
    not possible, and nothing has changed then."""
    c, slot, limit = jobs[j].cls, jobs[j].slot, wanted(jobs, j, rules, now)
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    if not classes[c].shared and count + (rest >= 0) > 1:
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
        n = choose(nodes, pieces, best, ways, levels, log, meta, context, p)
        if n < 0:
            refresh_yields(
                nodes, pieces, tree, read, asked, ways, levels, log, first, places, sorted_at, jobs, rules, meta, p, now
            )
            n = best_yield(nodes, pieces, tree, levels, first, places, sorted_at, jobs, rules, p, limit, j, now)
            if n < 0:
                break
            while not fits(nodes[n], pieces[p]):
                stopped[lifted] = places[first[n]].job
                lift(nodes, pieces, log, meta, room, classes, first, places, where, jobs, stopped[lifted])
                lifted += 1
        take(nodes, pieces, log, meta, room, n, p, 0, 1)
        where[slot + i] = n
        placed += 1
    if placed == count + (rest >= 0):
        return reprieve(
            nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, stopped, lifted, now
        )
    for i in range(placed):
        take(nodes, pieces, log, meta, room, where[slot + i], piece, 0, -1)
    for k in range(lifted):
        put_back(nodes, pieces, log, meta, room, classes, first, places, where, jobs, rules, stopped[k], now)
    meta[RANDOM_STATE] = random  # an attempt that fails leaves nothing behind
    return -1
