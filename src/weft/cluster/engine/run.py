"""The event loop for jobs that run to their end once started: completions, arrivals, then whoever may start.

At one moment completions come first, then arrivals, then one pass over the queue. *Strict*: the head of the queue waits and
nobody passes it. *Skip*: everyone who fits may pass. The queue's order is a rank for each job, fixed beforehand; every class
of jobs keeps a heap of ranks, so that one look at each class finds the next who may start.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.allocate import block, give_back, place
from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.reasons import PRIORITY, begin_waiting, end_waiting, lacking, settle, why

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
def next_moment(jobs, running, progress):
    """When the next job arrives or completes: inf where none does."""
    now = np.inf
    if progress[ARRIVED] < len(jobs):
        now = jobs[progress[ARRIVED]].submit
    if progress[RUNNING]:
        now = min(now, running[0].time)
    return now


@compiled
def first_ready(heap, classes, ready, count, strict):
    """Of the ``ready`` classes the one whose first job comes next, -1 for none; those that have become empty or blocked are
    left out. Says how many are left."""
    head, found, kept = NOBODY, np.int64(-1), 0
    for i in range(count):
        c = ready[i]
        if classes[c].size == 0 or (classes[c].blocked and not strict):
            continue
        ready[kept] = c
        kept += 1
        rank = heap[classes[c].begin]
        if rank < head:
            head, found = rank, c
    return kept, found


@compiled
def advance(
    jobs, of_rank, heap, running, progress, where, on, nodes, pieces, best, ways, levels, log, meta, context, room, classes,
    total, waits, active, ready, strict, until, most,
):  # fmt: skip
    """Runs up to ``most`` moments, none after ``until``; says whether anything is left to happen.

    ``total`` [C, reasons]: seconds that a class has waited for each reason; ``waits`` [J, reasons]: the same of a job, which
    is the difference of its class's total at its start and at its arrival.
    """
    count = 0  # of `active` classes, which have waiting jobs
    for c in range(len(classes)):
        if classes[c].size:
            active[count] = c
            count += 1
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
        newly = count
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
            begin_waiting(classes, total, waits, c, job, now)
            if classes[c].size == 0:
                active[count] = c
                count += 1
            push_rank(heap, classes, c, jobs[job].rank)
            progress[ARRIVED] += 1
        able = 0  # so many of the active classes are `ready` to be asked
        for i in range(count):
            if strict or not classes[active[i]].blocked:
                ready[able] = active[i]
                able += 1
        taken = False
        while True:
            able, c = first_ready(heap, classes, ready, able, strict)
            if c < 0 or classes[c].blocked:
                break
            job = of_rank[heap[classes[c].begin]]
            if place(
                nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, jobs[job].slot
            ):
                pop_rank(heap, classes, c)
                end_waiting(classes, total, waits, c, job, now)
                jobs[job].start = now
                started = taken = True
                push_completion(running, progress, now + jobs[job].duration, job)
                continue
            classes[c].blocked = True
            if taken and not strict:  # as others may be, for what has been taken
                block(nodes, pieces, best, ways, levels, log, meta, context, classes, ready, able)
            taken = False
        kept = first = 0 if freed or started else newly  # else nothing changed for those who waited
        for i in range(first, count):
            c, reason = active[i], -1
            if classes[c].size:
                active[kept] = c
                kept += 1
                if classes[c].reason == PRIORITY and not started:
                    continue  # what fits fits the better for what was freed
                reason = lacking(pieces, meta, room, classes, c) if classes[c].blocked else -1
                if reason < 0:
                    slot = jobs[of_rank[heap[classes[c].begin]]].slot
                    reason = why(
                        nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot
                    )
            if reason != classes[c].reason:
                settle(classes, total, c, now)
                classes[c].reason = reason
        count = kept
    return True
