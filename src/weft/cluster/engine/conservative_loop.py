"""The event loop of conservative backfill: every waiting job has a reservation in the plan
(``weft.cluster.reference.backfill`` is the plain form).

The plan is kept from one event to the next, since with estimates that hold it would come out the same. It is made anew
when a job ends before its estimate or runs beyond it, and from the first new job on that the queue's order puts before
others. The job due next is the head of a heap, and the earliest time for a new job comes from the windows between
planned pieces (conservative_plan.py), so that an event costs the same however many jobs wait.
"""

from typing import Any, NamedTuple

import numpy as np

from weft.cluster.engine.allocate import give_back, kind_of, pieces_of, place
from weft.cluster.engine.compiled import compiled, entry
from weft.cluster.engine.conservative_plan import MOST_LENGTHS, PLANNED, Plan, enter, leave, mark_changed, plan_job
from weft.cluster.engine.node import take
from weft.cluster.engine.queues import (
    ARRIVED,
    COMPLETED,
    ENTRY,
    RUNNING,
    next_event,
    pop_completion,
    push,
    push_completion,
    remove,
)
from weft.cluster.engine.tables import Advance, Tables
from weft.cluster.engine.tree import NEVER
from weft.cluster.engine.wait_reasons import PRIORITY, begin_waiting, end_waiting, set_reason, why
from weft.cluster.order import LEAST_S

# `counts`: entries of the queue, those of them that still wait, and those of `due`.
ENTRIES, WAITING, DUE, COUNTS = range(4)


class Queue(NamedTuple):
    jobs: Any  # [J] queues.JOB
    running: Any  # the heap of completions
    progress: Any  # counters
    total: Any  # [C, reasons]: seconds that a class has waited for each reason
    waits: Any  # [J, reasons]: the same of a job
    queue: Any  # waiting jobs, in order, and among them some that have started since
    due: Any  # a heap of waiting jobs by planned beginning
    counts: Any  # [COUNTS]


@compiled
def forget(s, q, plan, job):
    """Takes a waiting job out of the plan."""
    jobs = q.jobs
    if jobs[job].begins < np.inf:
        for slot in range(jobs[job].slot, jobs[job].slot + pieces_of(s.classes, jobs[job].cls)):
            leave(s, plan, slot)
            mark_changed(plan, s.where[slot])
        remove(q.due, jobs, 0, q.counts[DUE], job)
        q.counts[DUE] -= 1
    jobs[job].begins = np.nan


@compiled
def start(s, q, job, now):
    """Starts a job whose pieces are allocated."""
    c = q.jobs[job].cls
    s.classes[c].size -= 1
    q.counts[WAITING] -= 1
    end_waiting(s.classes, q.total, q.waits, c, job, now)
    q.jobs[job].start = now
    push_completion(q.running, q.progress, now + q.jobs[job].duration, job)


@compiled
def allocate(s, q, job):
    """Allocates a job's pieces where they are planned."""
    for i in range(pieces_of(s.classes, q.jobs[job].cls)):
        take(s, s.where[q.jobs[job].slot + i], kind_of(s.classes, q.jobs[job].cls, i), 0, 1)


@compiled
def compact(q):
    """Drops jobs from the queue that have started, once they are half of it."""
    if q.counts[ENTRIES] < 2 * q.counts[WAITING] + 64:
        return
    kept = 0
    for k in range(q.counts[ENTRIES]):
        if np.isnan(q.jobs[q.queue[k]].start):
            q.queue[kept] = q.queue[k]
            kept += 1
    q.counts[ENTRIES] = kept


@entry
def advance(s, q, plan, overruns, until, most):
    """Runs up to ``most`` event times, none after ``until``; says whether anything is left to happen. ``overruns``:
    some job runs beyond its estimate."""
    classes, jobs, progress, counts, queue = s.classes, q.jobs, q.progress, q.counts, q.queue
    for _ in range(most):
        now = next_event(jobs, q.running, progress)
        if now == np.inf or now > until:
            return False
        freed = started = anew = False
        while progress[RUNNING] and q.running[0].time == now:
            freed = True
            job = q.running[0].job
            c, slot = jobs[job].cls, jobs[job].slot
            pop_completion(q.running, progress)
            for i in range(slot, slot + pieces_of(classes, c)):
                leave(s, plan, i)
                if jobs[job].ends != now:
                    mark_changed(plan, s.where[i])
            anew |= jobs[job].ends != now
            give_back(s, c, slot)
            progress[COMPLETED] += 1
        compact(q)
        from_here = counts[ENTRIES]
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
            begin_waiting(classes, q.total, q.waits, c, job, now)
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
        if overruns:  # a job that runs beyond its estimate now invalidates the plan
            anew |= counts[DUE] > 0 and q.due[0].key < now
            for k in range(progress[RUNNING]):
                anew |= jobs[q.running[k].job].ends <= now
        if anew:
            from_here = 0
        before = counts[WAITING]  # so many of them in the queue before `from_here`
        for k in range(from_here, counts[ENTRIES]):
            if np.isnan(jobs[queue[k]].start):
                before -= 1
                if not np.isnan(jobs[queue[k]].begins):
                    forget(s, q, plan, queue[k])
        while counts[DUE] and q.due[0].key == now:
            job = q.due[0].job
            remove(q.due, jobs, 0, counts[DUE], job)
            counts[DUE] -= 1
            allocate(s, q, job)
            start(s, q, job, now)
            before, started = before - 1, True
        for k in range(from_here, counts[ENTRIES]):
            job = queue[k]
            if not np.isnan(jobs[job].start):
                continue
            # While no job before it waits, what is free now remains free: the index finds its nodes.
            if before == 0 and place(s, jobs[job].cls, jobs[job].slot):
                jobs[job].begins, jobs[job].ends = now, now + max(jobs[job].estimate, LEAST_S)
                for i in range(pieces_of(classes, jobs[job].cls)):
                    enter(s, plan, job, i)
            else:
                plan_job(s, plan, job, now)
                if jobs[job].begins == now:
                    allocate(s, q, job)
            if jobs[job].begins == now:
                start(s, q, job, now)
                started = True
                continue
            before += 1
            if jobs[job].begins < np.inf:
                push(q.due, jobs, 0, counts[DUE], jobs[job].begins, job)
                counts[DUE] += 1
        for c in range(len(classes)):
            reason = -1
            if classes[c].size:
                if classes[c].reason >= 0 and not started and (not freed or classes[c].reason == PRIORITY):
                    continue  # nothing changed for it: what fits still fits with what was freed
                # What `why` tries, it writes to where[slot:]: the last slots are no job's.
                reason = why(s, c, len(s.where) - classes[c].count - 1)
            set_reason(classes, q.total, c, reason, now)
    return True


def loop(t: Tables) -> Advance:
    """``advance(most)``. ``where`` has room for one more job at its end."""
    table, s, count = t.jobs, t.state, len(t.state.nodes)
    lengths = np.maximum(table["estimate"], LEAST_S)
    requested, s.pieces["gpus_index"] = np.unique(s.pieces["gpus"], return_inverse=True)
    of_windows = lengths  # where no job can run
    if len(lengths):
        of_windows = np.unique(np.quantile(lengths, np.arange(MOST_LENGTHS) / MOST_LENGTHS, method="lower"))
    plan = Plan(
        table, np.full((count, 2), -1, np.int32), np.zeros(len(s.where), PLANNED), requested, of_windows,
        np.full((len(requested) * len(of_windows), s.levels[-1]), NEVER), np.full(count, NEVER),
        np.append(np.arange(count), count), np.zeros((2, len(requested))), np.zeros(count), np.zeros(count, np.int64),
        np.zeros(count),
    )  # fmt: skip
    queue, due = (np.zeros(len(table), kind) for kind in (np.int64, ENTRY))
    q = Queue(table, t.running, t.progress, t.total, t.waits, queue, due, np.zeros(COUNTS, np.int64))
    overruns = bool((lengths < table["duration"]).any())
    return lambda most: advance(s, q, plan, overruns, t.until, most)
