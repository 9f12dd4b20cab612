"""The event loop for jobs that run to their end once started: strict and skip.

At one time completions come first, then arrivals, then one pass over the queue. *Strict*: the head of the queue blocks
all others. *Skip*: any job that fits may start. The queue's order is a rank for each job, fixed beforehand; every class
of jobs has a heap of ranks, so that one look at each class finds the next job that may start.
"""

from typing import Any, NamedTuple

import numpy as np

from weft.cluster.engine.allocate import block, give_back, place
from weft.cluster.engine.compiled import compiled, entry
from weft.cluster.engine.queues import (
    ARRIVED,
    COMPLETED,
    NO_RANK,
    RUNNING,
    next_event,
    pop_completion,
    pop_rank,
    push_completion,
    push_rank,
)
from weft.cluster.engine.tables import Advance, Tables
from weft.cluster.engine.wait_reasons import PRIORITY, begin_waiting, end_waiting, known_reason, set_reason, why


class Queue(NamedTuple):
    jobs: Any  # [J] queues.JOB
    running: Any  # the heap of completions
    progress: Any  # counters
    total: Any  # [C, reasons]: seconds that a class has waited for each reason
    waits: Any  # [J, reasons]: the same of a job: the difference of its class's total at its start and at its arrival
    of_rank: Any  # the job of each rank
    heap: Any  # the ranks of waiting jobs, a heap for each class
    active: Any  # classes with waiting jobs
    ready: Any  # those of them that may start jobs


@compiled
def first_ready(heap, classes, ready, count, strict):
    """How many of the ``ready`` classes are left without those that have become empty or blocked, and the one whose
    first job comes next, -1 for none."""
    head, found, kept = NO_RANK, np.int64(-1), 0
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


@entry
def advance(s, q, strict, until, most):
    """Runs up to ``most`` event times, none after ``until``; says whether anything is left to happen."""
    classes, jobs, progress, active = s.classes, q.jobs, q.progress, q.active
    count = 0  # of `active` classes
    for c in range(len(classes)):
        if classes[c].size:
            active[count] = c
            count += 1
    for _ in range(most):
        now = next_event(jobs, q.running, progress)
        if now == np.inf or now > until:
            return False
        freed = started = False
        while progress[RUNNING] and q.running[0].time == now:
            freed = True
            job = q.running[0].job
            pop_completion(q.running, progress)
            give_back(s, jobs[job].cls, jobs[job].slot)
            progress[COMPLETED] += 1
        newly = count
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
            begin_waiting(classes, q.total, q.waits, c, job, now)
            if classes[c].size == 0:
                active[count] = c
                count += 1
            push_rank(q.heap, classes, c, jobs[job].rank)
            progress[ARRIVED] += 1
        able = 0  # so many of the active classes are `ready`
        for i in range(count):
            if strict or not classes[active[i]].blocked:
                q.ready[able] = active[i]
                able += 1
        taken = False
        while True:
            able, c = first_ready(q.heap, classes, q.ready, able, strict)
            if c < 0 or classes[c].blocked:
                break
            job = q.of_rank[q.heap[classes[c].begin]]
            if place(s, c, jobs[job].slot):
                pop_rank(q.heap, classes, c)
                end_waiting(classes, q.total, q.waits, c, job, now)
                jobs[job].start = now
                started = taken = True
                push_completion(q.running, progress, now + jobs[job].duration, job)
                continue
            classes[c].blocked = True
            if taken and not strict:  # as others may be, for what has been taken
                block(s, q.ready, able)
            taken = False
        kept = first = 0 if freed or started else newly  # else nothing changed for those that waited
        for i in range(first, count):
            c, reason = active[i], -1
            if classes[c].size:
                active[kept] = c
                kept += 1
                if classes[c].reason == PRIORITY and not started:
                    continue  # what fits still fits with what was freed
                reason = known_reason(s, c) if classes[c].blocked else -1
                if reason < 0:
                    reason = why(s, c, jobs[q.of_rank[q.heap[classes[c].begin]]].slot)
            set_reason(classes, q.total, c, reason, now)
        count = kept
    return True


def loop(t: Tables, strict: bool) -> Advance:
    """``advance(most)``."""
    active, ready = np.zeros((2, len(t.state.classes)), np.int64)
    heap = np.zeros(len(t.jobs), np.int32)
    q = Queue(t.jobs, t.running, t.progress, t.total, t.waits, t.of_rank, heap, active, ready)
    return lambda most: advance(t.state, q, strict, t.until, most)
