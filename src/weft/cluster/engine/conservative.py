"""The event loop of conservative backfill: everyone who waits has a place in the plan (``plan.py`` is the plain form of it).

The plan is kept from one moment to the next, since by estimates that hold it would come out the same. It is made anew when
a job ends before its estimate or stays beyond it, and from the first newcomer on that the queue's order puts before others.
For each job the moments at which a node could take it are found from the list of what stays there, running or planned
(engine/holes.py).
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.allocate import give_back, place
from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.holes import able_at, best_of, forget_holes, moment_for, stay_on, value_of
from weft.cluster.engine.node import take
from weft.cluster.engine.promise import leave
from weft.cluster.engine.reasons import PRIORITY, begin_waiting, end_waiting, settle, why
from weft.cluster.engine.run import ARRIVED, COMPLETED, RUNNING, next_moment, pop_completion, push_completion
from weft.cluster.engine.tree import NEVER
from weft.cluster.plan import LEAST_S


@compiled
def plan(
    nodes, pieces, meta, context, first, places, jobs, where, holes, asked, ready, able, values, view, classes, job, now
):  # fmt: skip
    """Gives a job the earliest moment and its nodes, or none (moment inf): enters it in the lists of its nodes."""
    c, slot = jobs[job].cls, jobs[job].slot
    p, count, rest, shared = classes[c].piece, classes[c].count, classes[c].rest, classes[c].shared
    length = max(jobs[job].estimate, LEAST_S)
    moment = moment_for(
        nodes, pieces, first, places, holes, asked, ready, p, count, rest, shared and count > 1, length, now
    )
    end = moment + length
    jobs[job].begins, jobs[job].ends = moment, end
    if moment == np.inf:
        return
    some = 0
    for i in range(count + (rest >= 0)):
        kind = rest if i >= count else p
        if i == 0 or i == count:
            some = able_at(
                nodes, pieces, meta, context, first, places, holes, able, values, view, kind, moment, length, now
            )
        if i == count:
            for k in range(some):
                for other in range(slot, slot + count):
                    if where[other] == able[k]:  # it may not hold two pieces
                        values[k] = NEVER
        k = best_of(values, some, meta)
        where[slot + i] = able[k]
        stay_on(first, places, holes, where, slot + i, 1, job, kind, -1, moment, end)
        values[k] = NEVER
        if shared:
            values[k] = value_of(
                nodes, pieces, meta, context, first, places, view, able[k], kind, moment, end, now
            )  # fmt: skip


@compiled
def forget(jobs, first, places, where, holes, classes, job):
    """Takes a planned job out of the plan."""
    if jobs[job].begins < np.inf:
        c, slot = jobs[job].cls, jobs[job].slot
        leave(first, places, where, slot, classes[c].count + (classes[c].rest >= 0))
        forget_holes(holes, where, slot, classes[c].count + (classes[c].rest >= 0))
    jobs[job].begins = np.nan


@compiled
def advance(
    jobs, queue, running, progress, where, on, first, places, holes, asked, ready, able, values, view, overruns,
    nodes, pieces, best, ways, levels, log, meta, context, room, classes, total, waits, until, most,
):  # fmt: skip
    """Runs up to ``most`` moments, none after ``until``; says whether anything is left to happen.

    ``queue``: the jobs that wait, in order; its last entry is how many.
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
            leave(first, places, where, slot, classes[c].count + (classes[c].rest >= 0))
            if jobs[job].ends != now:
                anew = True
                forget_holes(holes, where, slot, classes[c].count + (classes[c].rest >= 0))
            give_back(nodes, pieces, log, meta, room, classes, c, where, on, slot)
            progress[COMPLETED] += 1
        length, from_here = queue[-1], queue[-1]
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
            begin_waiting(classes, total, waits, c, job, now)
            k = length
            while k > 0 and jobs[queue[k - 1]].rank > jobs[job].rank:
                queue[k] = queue[k - 1]
                k -= 1
            queue[k] = job
            length += 1
            classes[c].size += 1
            from_here = min(from_here, k)
            progress[ARRIVED] += 1
        if overruns:  # some job stays beyond its estimate: whoever does so now spoils the plan
            for k in range(progress[RUNNING]):
                anew |= jobs[running[k].job].ends <= now
            for k in range(length):
                anew |= jobs[queue[k]].begins < now
        if anew:
            from_here = 0
        for k in range(from_here, length):
            if jobs[queue[k]].begins == jobs[queue[k]].begins:
                forget(jobs, first, places, where, holes, classes, queue[k])
        kept = 0
        for k in range(length):
            job = queue[k]
            c, slot = jobs[job].cls, jobs[job].slot
            pieces_of = classes[c].count + (classes[c].rest >= 0)
            if k >= from_here:
                # While nobody before it waits, what is free now stays free: the trees find its nodes.
                if kept == 0 and place(
                    nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot
                ):
                    jobs[job].begins, jobs[job].ends = now, now + max(jobs[job].estimate, LEAST_S)
                    stay_on(
                        first, places, holes, where, slot, pieces_of, job, classes[c].piece, classes[c].rest, now,
                        jobs[job].ends,
                    )  # fmt: skip
                else:
                    plan(
                        nodes, pieces, meta, context, first, places, jobs, where, holes, asked, ready, able, values, view,
                        classes, job, now,
                    )  # fmt: skip
                    for i in range(pieces_of if jobs[job].begins == now else 0):
                        kind = classes[c].rest if i >= classes[c].count else classes[c].piece
                        take(nodes, pieces, log, meta, room, where[slot + i], kind, 0, 1)
            elif jobs[job].begins == now:
                for i in range(pieces_of):
                    kind = classes[c].rest if i >= classes[c].count else classes[c].piece
                    take(nodes, pieces, log, meta, room, where[slot + i], kind, 0, 1)
            if jobs[job].begins != now:
                queue[kept] = job
                kept += 1
                continue
            classes[c].size -= 1
            end_waiting(classes, total, waits, c, job, now)
            jobs[job].start, started = now, True
            push_completion(running, progress, now + jobs[job].duration, job)
        queue[-1] = kept
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
