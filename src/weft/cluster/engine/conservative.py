"""The event loop of conservative backfill: everyone who waits has a place in the plan (``plan.py`` is the plain form of it).

The plan is kept from one moment to the next, since by estimates that hold it would come out the same. It is made anew when
a job ends before its estimate or stays beyond it, and from the first newcomer on that the queue's order puts before others.
Who is due next is the head of a heap, and the earliest moment for a newcomer comes from the holes between those who stay
(engine/holes.py), so that a moment costs the same however many wait.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.allocate import give_back, place
from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.heaps import put, remove, rise
from weft.cluster.engine.holes import able_at, best_of, look_at_changed, mark, moment_for, value_of
from weft.cluster.engine.node import take
from weft.cluster.engine.reasons import PRIORITY, begin_waiting, end_waiting, settle, why
from weft.cluster.engine.run import ARRIVED, COMPLETED, RUNNING, next_moment, pop_completion, push_completion
from weft.cluster.engine.timeline import enter, leave
from weft.cluster.engine.tree import NEVER
from weft.cluster.plan import LEAST_S

# `counts`: entries of the queue, those of them that still wait, and those of `due`, a heap of who waits by planned beginning.
ENTRIES, WAITING, DUE, COUNTS = range(4)


@compiled
def pieces_of(classes, c):
    return classes[c].count + (classes[c].rest >= 0)


@compiled
def kind_of(classes, c, i):
    """The kind of a job's i-th piece."""
    return classes[c].piece if i < classes[c].count else classes[c].rest


@compiled
def stay(jobs, classes, where, first, stays, looked, changed, job, i):
    """Enters a job's i-th piece in the lists of its node."""
    slot = jobs[job].slot + i
    enter(first, stays, where[slot], slot, kind_of(classes, jobs[job].cls, i), jobs[job].begins, jobs[job].ends)
    mark(looked, changed, where[slot])


@compiled
def plan(
    nodes, pieces, meta, context, jobs, classes, where, first, stays, asked, spans, opens, looked, changed, scratch, ways,
    levels, ready, able, values, job, now,
):  # fmt: skip
    """Gives a job the earliest moment and its nodes, or none (moment inf): enters it in the lists of its nodes."""
    c, slot = jobs[job].cls, jobs[job].slot
    count, rest, shared = classes[c].count, classes[c].rest, classes[c].shared
    length = max(jobs[job].estimate, LEAST_S)
    look_at_changed(nodes, pieces, first, stays, asked, spans, opens, looked, changed, scratch, ways, levels, now)
    moment = moment_for(
        nodes, pieces, first, stays, asked, spans, opens, looked, scratch, ways, levels, ready, classes[c].piece, count, rest,
        shared and count > 1, length, now,
    )  # fmt: skip
    jobs[job].begins, jobs[job].ends = moment, moment + length
    if moment == np.inf:
        return
    some = 0
    for i in range(pieces_of(classes, c)):
        kind = kind_of(classes, c, i)
        if i == 0 or i == count:
            some = able_at(
                nodes, pieces, meta, context, first, stays, spans, opens, levels, able, values, kind, moment, length, now
            )  # fmt: skip
        if i == count:
            for k in range(some):
                for other in range(slot, slot + count):
                    if where[other] == able[k]:  # it may not hold two pieces
                        values[k] = NEVER
        k = best_of(values, some, meta)
        where[slot + i] = able[k]
        stay(jobs, classes, where, first, stays, looked, changed, job, i)
        values[k] = NEVER
        if shared:
            values[k] = value_of(
                nodes, pieces, meta, context, first, stays, able[k], kind, moment, moment + length, now
            )


@compiled
def forget(jobs, classes, where, first, stays, looked, changed, due, counts, job):
    """Takes a waiting job out of the plan."""
    if jobs[job].begins < np.inf:
        for slot in range(jobs[job].slot, jobs[job].slot + pieces_of(classes, jobs[job].cls)):
            leave(first, stays, where[slot], slot)
            mark(looked, changed, where[slot])
        remove(due, jobs, 0, counts[DUE], job)
        counts[DUE] -= 1
    jobs[job].begins = np.nan


@compiled
def start(jobs, classes, total, waits, running, progress, counts, job, now):
    """A job whose pieces are allocated begins."""
    c = jobs[job].cls
    classes[c].size -= 1
    counts[WAITING] -= 1
    end_waiting(classes, total, waits, c, job, now)
    jobs[job].start = now
    push_completion(running, progress, now + jobs[job].duration, job)


@compiled
def allocate(nodes, pieces, log, meta, room, jobs, classes, where, job):
    """Allocates a job's pieces where they are planned."""
    for i in range(pieces_of(classes, jobs[job].cls)):
        take(nodes, pieces, log, meta, room, where[jobs[job].slot + i], kind_of(classes, jobs[job].cls, i), 0, 1)


@compiled
def tidy(jobs, queue, counts):
    """Drops those from the queue who no longer wait, once they are half of it."""
    if counts[ENTRIES] < 2 * counts[WAITING] + 64:
        return
    kept = 0
    for k in range(counts[ENTRIES]):
        if np.isnan(jobs[queue[k]].start):
            queue[kept] = queue[k]
            kept += 1
    counts[ENTRIES] = kept


@compiled
def advance(
    jobs, queue, due, counts, running, progress, where, on, first, stays, asked, spans, opens, looked, changed, scratch, ready,
    able, values, overruns, nodes, pieces, best, ways, levels, log, meta, context, room, classes, total, waits, until,
    most,
):  # fmt: skip
    """Runs up to ``most`` moments, none after ``until``; says whether anything is left to happen.

    ``queue``: those who wait, in order, and among them some who have started since.
    """
    for _ in range(most):
        now = next_moment(jobs, running, progress)
        if now == np.inf or now > until:
            return False
        freed = started = anew = False
        while progress[RUNNING] and running[0].time == now:
            freed = True
            job = running[0].job
            c, slot = jobs[job].cls, jobs[job].slot
            pop_completion(running, progress)
            for i in range(slot, slot + pieces_of(classes, c)):
                leave(first, stays, where[i], i)
                if jobs[job].ends != now:
                    mark(looked, changed, where[i])
            anew |= jobs[job].ends != now
            give_back(nodes, pieces, log, meta, room, classes, c, where, on, slot)
            progress[COMPLETED] += 1
        tidy(jobs, queue, counts)
        from_here = counts[ENTRIES]
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
            begin_waiting(classes, total, waits, c, job, now)
            k = counts[ENTRIES]
            while k > 0 and jobs[queue[k - 1]].rank > jobs[job].rank:
                queue[k] = queue[k - 1]
                k -= 1
            queue[k] = job
            counts[ENTRIES] += 1
            counts[WAITING] += 1
            classes[c].size += 1
            from_here = min(from_here, k)
            progress[ARRIVED] += 1
        if overruns:  # some job stays beyond its estimate: whoever does so now spoils the plan
            anew |= counts[DUE] > 0 and due[0].key < now
            for k in range(progress[RUNNING]):
                anew |= jobs[running[k].job].ends <= now
        if anew:
            from_here = 0
        before = counts[WAITING]  # so many of them in the queue before `from_here`
        for k in range(from_here, counts[ENTRIES]):
            if np.isnan(jobs[queue[k]].start):
                before -= 1
                if not np.isnan(jobs[queue[k]].begins):
                    forget(jobs, classes, where, first, stays, looked, changed, due, counts, queue[k])
        while counts[DUE] and due[0].key == now:
            job = due[0].job
            remove(due, jobs, 0, counts[DUE], job)
            counts[DUE] -= 1
            allocate(nodes, pieces, log, meta, room, jobs, classes, where, job)
            start(jobs, classes, total, waits, running, progress, counts, job, now)
            before, started = before - 1, True
        for k in range(from_here, counts[ENTRIES]):
            job = queue[k]
            if not np.isnan(jobs[job].start):
                continue
            # While nobody before it waits, what is free now stays free: the trees find its nodes.
            if before == 0 and place(
                nodes, pieces, best, ways, levels, log, meta, context, room, classes, jobs[job].cls, where, on, jobs[job].slot
            ):  # fmt: skip
                jobs[job].begins, jobs[job].ends = now, now + max(jobs[job].estimate, LEAST_S)
                for i in range(pieces_of(classes, jobs[job].cls)):
                    stay(jobs, classes, where, first, stays, looked, changed, job, i)
            else:
                plan(
                    nodes, pieces, meta, context, jobs, classes, where, first, stays, asked, spans, opens, looked, changed,
                    scratch, ways, levels, ready, able, values, job, now,
                )  # fmt: skip
                if jobs[job].begins == now:
                    allocate(nodes, pieces, log, meta, room, jobs, classes, where, job)
            if jobs[job].begins == now:
                start(jobs, classes, total, waits, running, progress, counts, job, now)
                started = True
                continue
            before += 1
            if jobs[job].begins < np.inf:
                put(due, jobs, 0, counts[DUE], jobs[job].begins, job)
                rise(due, jobs, 0, counts[DUE])
                counts[DUE] += 1
        for c in range(len(classes)):
            reason = -1
            if classes[c].size:
                if classes[c].reason >= 0 and not started and (not freed or classes[c].reason == PRIORITY):
                    continue  # nothing changed for it: what fits fits the better for what was freed
                # What `why` tries, it writes to where[slot:]: the last slots are nobody's.
                slot = len(where) - classes[c].count - 1
                reason = why(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot)
            if reason != classes[c].reason:
                settle(classes, total, c, now)
                classes[c].reason = reason
    return True
