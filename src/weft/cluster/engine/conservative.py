"""The event loop of conservative backfill: everyone who waits has a place in the plan (``plan.py`` is the plain form of it).

The plan is kept from one moment to the next, since by estimates that hold it would come out the same. It is made anew when
a job ends before its estimate or stays beyond it, and from the first newcomer on that the queue's order puts before others.
For each job the moments at which a node could take it are found from the list of what stays there, running or planned.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.index import HIGHEST, NEVER, RANDOM
from weft.cluster.engine.node import PLACEMENT, TIES, below, score, take
from weft.cluster.engine.promise import leave, settle_on
from weft.cluster.engine.run import (
    ARRIVED,
    COMPLETED,
    PRIORITY,
    RUNNING,
    begin_waiting,
    end_waiting,
    give_back,
    next_moment,
    place,
    pop_completion,
    push_completion,
    settle,
    why,
)
from weft.cluster.plan import LEAST_S


@compiled
def ends_of(jobs, job, now):
    """When a job that is planned or runs is expected to end: who runs beyond its estimate may stay for ever."""
    return jobs[job].ends if jobs[job].ends > now else np.inf


@compiled
def least(nodes, pieces, first, places, jobs, n, begin, end, now):
    """What is free of node n throughout two moments: GPUs, cores, memory."""
    gpus, cpu, memory = np.int64(1 << 60), np.int64(1 << 60), np.int64(1 << 60)
    at = first[n]
    moment = begin
    while True:  # at the first moment, and at each later one at which something begins
        g, c, m = np.int64(nodes[n].gpus), nodes[n].cpu, nodes[n].memory
        slot = first[n]
        while slot >= 0:
            job = places[slot].job
            if jobs[job].begins <= moment < ends_of(jobs, job, now):
                g -= pieces[places[slot].piece].gpus
                c -= pieces[places[slot].piece].cpu
                m -= pieces[places[slot].piece].memory
            slot = places[slot].next
        gpus, cpu, memory = min(gpus, g), min(cpu, c), min(memory, m)
        while at >= 0 and not begin < jobs[places[at].job].begins < end:
            at = places[at].next
        if at < 0:
            return gpus, cpu, memory
        moment = jobs[places[at].job].begins
        at = places[at].next


@compiled
def room_for(nodes, pieces, first, places, jobs, n, p, begin, end, now):
    """How many pieces of kind p node n takes throughout two moments."""
    node, piece = nodes[n], pieces[p]
    if not (piece.types >> node.gpu_type) & 1 or (piece.gpu_memory > 0 and 0 <= node.gpu_memory < piece.gpu_memory):
        return 0
    gpus, cpu, memory = least(nodes, pieces, first, places, jobs, n, begin, end, now)
    count = np.int64(1 << 30)
    if piece.gpus > 0:
        count = min(count, gpus // piece.gpus)
    if node.cpu >= 0 and piece.cpu > 0:
        count = min(count, cpu // piece.cpu)
    if node.memory >= 0 and piece.memory > 0:
        count = min(count, memory // piece.memory)
    return max(count, 0)


@compiled
def soonest_on(nodes, pieces, first, places, jobs, n, p, since, length, now):
    """The earliest moment from ``since`` on at which node n takes a piece of kind p for so long: inf never."""
    if room_for(nodes, pieces, first, places, jobs, n, p, since, since + length, now) > 0:
        return since
    found = np.inf
    slot = first[n]
    while slot >= 0:
        ends = ends_of(jobs, places[slot].job, now)
        if (
            since < ends < found
            and room_for(nodes, pieces, first, places, jobs, n, p, ends, ends + length, now) > 0
        ):  # fmt: skip
            found = ends
        slot = places[slot].next
    return found


@compiled
def enough_at(nodes, pieces, first, places, jobs, p, count, rest, shared, begin, end, now):
    """Whether all pieces of a job fit throughout two moments."""
    able = able_rest = 0
    for n in range(len(nodes)):
        fits = room_for(nodes, pieces, first, places, jobs, n, p, begin, end, now)
        able += fits if shared else min(fits, 1)
        if rest >= 0:
            able_rest += min(room_for(nodes, pieces, first, places, jobs, n, rest, begin, end, now), 1)
    return able >= count and (rest < 0 or able_rest > count)


@compiled
def moment_for(nodes, pieces, first, places, jobs, ready, p, count, rest, shared, length, now):
    """The earliest moment from now on at which all pieces fit for so long; ``ready`` is room for a number a node."""
    moment = now
    while True:
        # No earlier than that: when the count-th node is able to take one for the first time from then on.
        for n in range(len(nodes)):
            ready[n] = soonest_on(nodes, pieces, first, places, jobs, n, p, moment, length, now)
        if shared:
            least_moment = ready[: len(nodes)].min()
        else:
            if count > len(nodes):
                return np.inf
            least_moment = np.partition(ready[: len(nodes)], count - 1)[count - 1]
        if least_moment == np.inf:
            return np.inf
        if count == 1 and rest < 0:
            return least_moment
        if enough_at(
            nodes, pieces, first, places, jobs, p, count, rest, shared, least_moment, least_moment + length, now
        ):
            return least_moment
        if least_moment > moment:
            moment = least_moment
            continue
        later = np.inf  # the next end of anything anywhere
        for n in range(len(nodes)):
            slot = first[n]
            while slot >= 0:
                ends = ends_of(jobs, places[slot].job, now)
                if moment < ends < later:
                    later = ends
                slot = places[slot].next
        if later == np.inf:
            return np.inf
        moment = later


@compiled
def value_of(
    nodes, pieces, meta, context, first, places, jobs, where, view, n, p, slot, placed, shared, moment, length, now
):  # fmt: skip
    """What the placement thinks of node n for the next piece of a job, by the least that is free while the job stays: NEVER
    where it does not fit, or holds one of the job's ``placed`` pieces and may not hold two."""
    for k in range(slot, slot + (0 if shared else placed)):
        if where[k] == n:
            return NEVER
    if room_for(nodes, pieces, first, places, jobs, n, p, moment, moment + length, now) <= 0:
        return NEVER
    view[0] = nodes[n]
    gpus, cpu, memory = least(nodes, pieces, first, places, jobs, n, moment, moment + length, now)
    view[0].free_gpus, view[0].free_cpu, view[0].free_memory = gpus, cpu, memory
    return score(meta[PLACEMENT], pieces[p], view[0], context)


@compiled
def plan(nodes, pieces, meta, context, first, places, jobs, where, ready, view, classes, job, now):
    """Gives a job the earliest moment and its nodes, or none (moment inf): enters it in the lists of its nodes."""
    c, slot = jobs[job].cls, jobs[job].slot
    p, count, rest, shared = classes[c].piece, classes[c].count, classes[c].rest, classes[c].shared
    length = max(jobs[job].estimate, LEAST_S)
    moment = moment_for(nodes, pieces, first, places, jobs, ready, p, count, rest, shared and count > 1, length, now)
    jobs[job].begins, jobs[job].ends = moment, moment + length
    if moment == np.inf:
        return
    for i in range(count + (rest >= 0)):
        kind = rest if i >= count else p
        top, chosen, equal = NEVER, -1, 0
        for n in range(len(nodes)):
            value = value_of(
                nodes, pieces, meta, context, first, places, jobs, where, view, n, kind, slot, i, shared, moment, length, now
            )  # fmt: skip
            if value > top or (value == top and value > NEVER and meta[TIES] == HIGHEST):
                top, chosen, equal = value, n, 1
            elif value == top:
                equal += 1
        left = below(meta, equal) if meta[TIES] == RANDOM else 0
        n = 0
        while meta[TIES] == RANDOM:
            value = value_of(
                nodes, pieces, meta, context, first, places, jobs, where, view, n, kind, slot, i, shared, moment, length, now
            )  # fmt: skip
            if value == top:
                chosen = n
                if left == 0:
                    break
                left -= 1
            n += 1
        where[slot + i] = chosen
        settle_on(first, places, where, slot + i, 1, job, kind, -1)


@compiled
def forget(jobs, first, places, where, classes, job):
    """Takes a planned job out of the plan."""
    if jobs[job].begins < np.inf:
        c, slot = jobs[job].cls, jobs[job].slot
        leave(first, places, where, slot, classes[c].count + (classes[c].rest >= 0))
    jobs[job].begins = np.nan


@compiled
def advance(
    jobs, queue, running, progress, where, on, first, places, ready, view, overruns,
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
            anew |= jobs[job].ends != now
            leave(first, places, where, slot, classes[c].count + (classes[c].rest >= 0))
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
                forget(jobs, first, places, where, classes, queue[k])
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
                    settle_on(first, places, where, slot, pieces_of, job, classes[c].piece, classes[c].rest)
                else:
                    plan(nodes, pieces, meta, context, first, places, jobs, where, ready, view, classes, job, now)
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
