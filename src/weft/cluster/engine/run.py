"""The event loop for jobs that run to their end once started: completions, arrivals, then whoever may start.

At one moment completions come first, then arrivals, then one pass over the queue. *Strict*: the head of the queue waits and
nobody passes it. *Skip*: everyone who fits may pass. The queue's order is a rank for each job, fixed beforehand; every class
of jobs keeps a heap of ranks, so that one look at each class finds the next who may start.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.index import choose, refresh
from weft.cluster.engine.node import DETAILED, RANDOM_STATE, TOPOLOGY, fits, pick, take
from weft.cluster.engine.topology import choose_among, fullest_of_best, nearest, takes_freed, takes_in
from weft.cluster.placement import REQUIRED

JOB = np.dtype(
    [
        *((name, "f8") for name in ("submit", "duration", "estimate", "start", "begins", "ends")),
        *((name, "i4") for name in ("cls", "rank", "place", "line")),
        ("slot", "i8"),
    ]
)  # begins: as planned; ends: by its estimate; place: among its class, by rank; slot: where its nodes begin in `where`;
# line: where tenants count, its tenant's part of its class (tenants.py)
COMPLETION = np.dtype([("time", "f8"), ("job", "i8")])
NOBODY = np.iinfo(np.int32).max
ARRIVED, COMPLETED, RUNNING, PROGRESS = 0, 1, 2, 3
PRIORITY, QUOTA, CAPACITY, TYPE, MEMORY, GANG, RACK, HOST, FRAGMENTATION = range(9)


@compiled
def push_rank(heap, classes, c, rank):
    begin, k = classes[c].begin, classes[c].size
    classes[c].size += 1
    while k > 0:
        parent = (k - 1) >> 1
        if heap[begin + parent] <= rank:
            break
        heap[begin + k] = heap[begin + parent]
        k = parent
    heap[begin + k] = rank


@compiled
def pop_rank(heap, classes, c):
    classes[c].size -= 1
    begin, size = classes[c].begin, classes[c].size
    last = heap[begin + size]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        if child + 1 < size and heap[begin + child + 1] < heap[begin + child]:
            child += 1
        if heap[begin + child] >= last:
            break
        heap[begin + k] = heap[begin + child]
        k = child
    heap[begin + k] = last


@compiled
def before(a, b):
    return a.time < b.time or (a.time == b.time and a.job < b.job)


@compiled
def push_completion(running, progress, time, job):
    k = progress[RUNNING]
    progress[RUNNING] += 1
    while k > 0:
        parent = (k - 1) >> 1
        above = running[parent]
        if above.time < time or (above.time == time and above.job < job):
            break
        running[k].time, running[k].job = above.time, above.job
        k = parent
    running[k].time, running[k].job = time, job


@compiled
def pop_completion(running, progress):
    progress[RUNNING] -= 1
    size = progress[RUNNING]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        if child + 1 < size and before(running[child + 1], running[child]):
            child += 1
        if not before(running[child], running[size]):
            break
        running[k].time, running[k].job = running[child].time, running[child].job
        k = child
    running[k].time, running[k].job = running[size].time, running[size].job


@compiled
def enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
    """Whether every piece of a job of class c finds a node, as far as counting tells: exact unless pieces may share a node."""
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    refresh(nodes, pieces, best, ways, levels, log, meta, context, piece)
    if pieces[piece].fitting < (1 if classes[c].shared else count):
        return False
    if rest < 0:
        return True
    refresh(nodes, pieces, best, ways, levels, log, meta, context, rest)  # whole nodes fit the remainder too
    return pieces[rest].fitting > count


@compiled
def place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot):
    """Allocates all pieces of a job of class c, or none; their nodes go to ``where[slot:]``, and the GPUs that
    they take of them, a bit for each, to ``on[slot:]`` in a detailed run."""
    if not enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
        return False
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    placed, random = 0, meta[RANDOM_STATE]
    # For a placement that looks at racks: among which nodes the pieces before `until` go.
    begin, end, until = np.int64(0), np.int64(0), 0
    for i in range(count + (rest >= 0)):
        p = piece if i < count else rest
        if meta[TOPOLOGY]:
            if i == until:
                if count == 1 and rest < 0:
                    begin, end, taken = fullest_of_best(nodes, best, levels, meta, piece)
                else:
                    begin, end, taken = nearest(nodes, pieces, meta, piece, max(count - i, 0), rest)
                until += taken
            n = choose_among(nodes, pieces, meta, context, p, begin, end)
        else:
            n = choose(nodes, pieces, best, ways, levels, log, meta, context, p)
        if n < 0:
            break
        gpus = 0
        if meta[DETAILED]:
            gpus = pick(nodes[n], pieces[p], context, meta)
            on[slot + i] = gpus
        take(nodes, pieces, log, meta, room, n, p, gpus, 1)
        where[slot + i] = n
        placed += 1
    if placed == count + (rest >= 0):
        return True
    for i in range(placed):
        gpus = on[slot + i] if meta[DETAILED] else 0
        take(nodes, pieces, log, meta, room, where[slot + i], piece, gpus, -1)
    meta[RANDOM_STATE] = random  # an attempt that fails leaves nothing behind
    return False


@compiled
def give_back(nodes, pieces, log, meta, room, classes, c, where, on, slot):
    """Frees a job's pieces, and wakes the classes that could use them."""
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    last = slot + count + (rest >= 0)
    for i in range(slot, last):
        gpus = on[i] if meta[DETAILED] else 0
        take(nodes, pieces, log, meta, room, where[i], piece if i < slot + count else rest, gpus, -1)
    for other in range(len(classes)):
        if not classes[other].blocked:
            continue
        if classes[other].count > 1 or classes[other].rest >= 0:
            classes[other].blocked = meta[TOPOLOGY] == REQUIRED and not takes_freed(
                nodes, pieces, meta, classes[other].piece, classes[other].count, classes[other].rest, where, slot, last
            )
            continue
        for i in range(slot, last):
            if fits(nodes[where[i]], pieces[classes[other].piece]):
                classes[other].blocked = False
                break


@compiled
def why(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot):
    """What a class of waiting jobs waits for: the first thing that one of them alone would lack now. ``where[slot:]`` is a
    waiting job's: what is tried there is forgotten."""
    gang = classes[c].count > 1 or classes[c].rest >= 0
    in_one_rack = gang and meta[TOPOLOGY] == REQUIRED
    if not classes[c].blocked and not in_one_rack and (classes[c].count == 1 or not classes[c].shared):
        if enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
            return PRIORITY
        classes[c].blocked = True
    elif not classes[c].blocked:
        random = meta[RANDOM_STATE]
        if place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot):
            for i in range(classes[c].count + (classes[c].rest >= 0)):
                p = classes[c].piece if i < classes[c].count else classes[c].rest
                gpus = on[slot + i] if meta[DETAILED] else 0
                take(nodes, pieces, log, meta, room, where[slot + i], p, gpus, -1)
            meta[RANDOM_STATE] = random
            return PRIORITY
        classes[c].blocked = True
    if room[0] < classes[c].milli:
        return CAPACITY
    if room[classes[c].of_type] < classes[c].milli:
        return TYPE
    if room[classes[c].of_memory] < classes[c].milli:
        return MEMORY
    if in_one_rack and enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
        if not classes[c].shared:
            return RACK
        count, piece = classes[c].count, classes[c].piece
        return RACK if takes_in(nodes, pieces, meta, 0, len(nodes), piece, count) == count else GANG
    if gang:
        return GANG
    if classes[c].bare == classes[c].piece:
        return FRAGMENTATION
    refresh(nodes, pieces, best, ways, levels, log, meta, context, classes[c].bare)
    return HOST if pieces[classes[c].bare].fitting else FRAGMENTATION


@compiled
def settle(classes, total, c, now):
    """Adds up what a class has waited for since it was last settled."""
    if classes[c].reason >= 0:
        total[c, classes[c].reason] += now - classes[c].since
    classes[c].since = now


@compiled
def begin_waiting(classes, total, waits, c, job, now):
    """A job waits from now on for what its class waits for: ``waits`` is the difference of its class's totals."""
    settle(classes, total, c, now)
    for reason in range(total.shape[1]):
        waits[job, reason] -= total[c, reason]


@compiled
def end_waiting(classes, total, waits, c, job, now):
    settle(classes, total, c, now)
    for reason in range(total.shape[1]):
        waits[job, reason] += total[c, reason]


@compiled
def next_moment(jobs, running, progress):
    """When the next job arrives or completes: inf where none does."""
    now = np.inf
    if progress[ARRIVED] < len(jobs):
        now = jobs[progress[ARRIVED]].submit
    if progress[RUNNING]:
        now = min(now, running[0].time)
    return now


@compiled
def advance(
    jobs, of_rank, heap, running, progress, where, on, nodes, pieces, best, ways, levels, log, meta, context, room, classes,
    total, waits, strict, until, most,
):  # fmt: skip
    """Runs up to ``most`` moments, none after ``until``; says whether anything is left to happen.

    ``total`` [C, reasons]: seconds that a class has waited for each reason; ``waits`` [J, reasons]: the same of a job, which
    is the difference of its class's total at its start and at its arrival.
    """
    for _ in range(most):
        now = next_moment(jobs, running, progress)
        if now == np.inf or now > until:
            return False
        freed = started = False
        while progress[RUNNING] and running[0].time == now:
            freed = True
            job = running[0].job
            pop_completion(running, progress)
            give_back(nodes, pieces, log, meta, room, classes, jobs[job].cls, where, on, jobs[job].slot)
            progress[COMPLETED] += 1
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
            begin_waiting(classes, total, waits, c, job, now)
            push_rank(heap, classes, c, jobs[job].rank)
            progress[ARRIVED] += 1
        while True:
            head, c = NOBODY, -1
            for other in range(len(classes)):
                if classes[other].size and (strict or not classes[other].blocked):
                    rank = heap[classes[other].begin]
                    if rank < head:
                        head, c = rank, other
            if c < 0 or classes[c].blocked:
                break
            job = of_rank[head]
            if place(
                nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, jobs[job].slot
            ):
                pop_rank(heap, classes, c)
                end_waiting(classes, total, waits, c, job, now)
                jobs[job].start = now
                started = True
                push_completion(running, progress, now + jobs[job].duration, job)
            else:
                classes[c].blocked = True
        for c in range(len(classes)):
            reason = -1
            if classes[c].size:
                if classes[c].reason >= 0 and not started and (not freed or classes[c].reason == PRIORITY):
                    continue  # nothing changed for it: what fits fits the better for what was freed
                slot = jobs[of_rank[heap[classes[c].begin]]].slot
                reason = why(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot)
            if reason != classes[c].reason:
                settle(classes, total, c, now)
                classes[c].reason = reason
    return True
