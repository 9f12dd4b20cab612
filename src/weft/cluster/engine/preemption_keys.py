"""The priority keys of jobs, of orders that preempt.

A waiting job has a key, which does not change while it waits. A running job's key is written so that it stays the same
as time passes: for keys that fall with every second (time remaining) that is the sum of the key and the time. Keys that
change otherwise are computed again at every time at which they are needed.
"""

from typing import Any, NamedTuple

import numpy as np

from weft.cluster.engine import queues
from weft.cluster.engine.compiled import compiled, inlined, switch
from weft.cluster.order import FALLING, FREE, RUNNING_FIRST
from weft.cluster.orders import ORDERS

# A job. `remaining`: seconds of its estimate that are not done; `work`: of its duration; `served`: seconds that it held
# its GPUs; `key`: its priority key; `level`: how many thresholds its service has passed; `sequence` orders the jobs of
# a level, those that `runs_in_level` first; `restart`: seconds that it needs before it works on. `begins` is when it
# started last, `ends` when it will end (NaN while it waits). `pending`: it was evicted in this pass, and its stretch is
# the one before that; `tried`: since then it has been tried once more.
JOB = np.dtype(
    [
        *queues.JOB.descr,
        *(
            (name, "f8")
            for name in ("remaining", "work", "served", "key", "gpus", "priority", "sequence", "restart", "lost")
        ),
        *((name, "i4") for name in ("level", "runs_in_level", "stops", "pending", "tried")),
    ]
)
# `progress` beyond the other loops': stretches so far, nodes written to `held`, pieces on nodes now, the last and the
# first sequence numbers given; of the pass in progress whether there is one, whether anything was freed and any job
# started, and how many jobs have been evicted and demoted.
STRETCHES, WRITTEN_NODES, PLACED_PIECES, LAST, FIRST, IN_PASS, CHANGED, STARTED, EVICTED, DEMOTED, PROGRESS = range(
    queues.PROGRESS, queues.PROGRESS + 11
)
# `rules`: how keys change, the order's code, whether equal keys preempt each other, seconds that a preempted job needs
# to restart, and between its checkpoints (0: it is saved when it is preempted), the time, and whether single GPUs are
# tracked; then what the order knows of the trace.
DRIFT, CODE, EQUALS, RESTART, EVERY, NOW, SINGLE = range(7)

key = switch(
    "key", ("job", "remaining", "served", "known"), [o.preemption.key for o in ORDERS.values() if o.preemption]
)


class Queue(NamedTuple):
    jobs: Any  # [J] JOB
    waiting: Any  # a heap of waiting jobs for each class
    events: Any  # a heap of running jobs by when they end or are demoted
    progress: Any  # counters
    total: Any  # [C, reasons]: seconds that a class has waited for each reason
    waits: Any  # [J, reasons]: the same of a job
    thresholds: Any  # [levels, 2]: of service, and whether a second counts once for each GPU
    rules: Any
    victims: Any  # jobs that the job being placed evicts
    evicted: Any  # jobs evicted in this pass
    demoted: Any  # jobs that came to another level at this time
    stretches: Any  # past runs of jobs, preemption_loop.STRETCH
    held: Any  # their nodes, preemption_loop.HELD
    first: Any  # [N]: the head of a node's list of pieces, the least important first
    placed: Any  # beside `where`, preemption_cost.PLACED
    sorted_at: Any  # [N]: the time for which keys that change freely were computed
    costs: Any  # [P, entries]: the preemption cost of each node for a kind, in a tree
    read: Any  # [P]: how much of the log has been read for that
    costs_at: Any  # [P]: the time for which it was computed


@inlined
def waiting_key(q, j, now):
    """Of a waiting job, to be compared with the keys of running ones."""
    return q.jobs[j].key + now if q.rules[DRIFT] == FALLING else q.jobs[j].key


@inlined
def may_preempt(q, limit, j, running, job):
    """Whether waiting job j with key ``limit`` may preempt a job with key ``running``."""
    return running > limit or (q.rules[EQUALS] > 0 and running == limit and job > j)


@inlined
def running_key(q, j, now):
    return current_key(q, j, now) if q.rules[DRIFT] == FREE else q.jobs[j].key


@inlined
def current_key(q, j, now):
    ran, jobs = now - q.jobs[j].begins, q.jobs
    found = key(
        np.int64(q.rules[CODE]), jobs[j], jobs[j].remaining + jobs[j].restart - ran, jobs[j].served + ran, q.rules
    )
    return found + now if q.rules[DRIFT] == FALLING else found


@compiled
def key_on_arrival(q, j):
    return key(np.int64(q.rules[CODE]), q.jobs[j], q.jobs[j].remaining, 0.0, q.rules)


@compiled
def give_sequence(q, j, last):
    """The last sequence number of its level, or the first among waiting jobs."""
    if last:
        q.progress[LAST] += 1
    else:
        q.progress[FIRST] -= 1
    sequence = q.progress[LAST] if last else q.progress[FIRST]
    q.jobs[j].sequence = sequence - RUNNING_FIRST if q.jobs[j].runs_in_level else sequence


@compiled
def join_running(q, j, now):
    """A running job takes its sequence number among the running ones, and its key."""
    if not q.jobs[j].runs_in_level:
        q.jobs[j].runs_in_level = 1
        give_sequence(q, j, True)
    q.jobs[j].key = current_key(q, j, now)


@compiled
def demote(q, j, now):
    """A running job comes to the next level, and is after all that wait there until the passes are over."""
    q.jobs[j].level += 1
    q.jobs[j].runs_in_level = 0
    give_sequence(q, j, True)
    q.jobs[j].key = current_key(q, j, now)


@compiled
def start(q, j, now):
    jobs = q.jobs
    jobs[j].restart = q.rules[RESTART] if jobs[j].stops else 0.0
    if not jobs[j].stops:
        jobs[j].start = now
    jobs[j].begins = now
    jobs[j].ends = now + (jobs[j].restart + jobs[j].work)
    join_running(q, j, now)


@compiled
def requeue_evicted(q, j, now):
    """An evicted job is tried once more in this pass, at its position in the queue."""
    found = running_key(q, j, now)
    q.jobs[j].key = found - now if q.rules[DRIFT] == FALLING else found
    q.jobs[j].ends = np.nan


@compiled
def go_on(q, j, now):
    """It has its own nodes again: as if nothing had happened to it."""
    q.jobs[j].key = current_key(q, j, now)
    q.jobs[j].ends = q.jobs[j].begins + (q.jobs[j].restart + q.jobs[j].work)


@compiled
def stop(q, j, now):
    """It is preempted: it keeps its work up to the last checkpoint."""
    jobs, every = q.jobs, q.rules[EVERY]
    ran = now - jobs[j].begins
    done = max(ran - jobs[j].restart, 0.0)
    kept = done if every <= 0 else min(np.floor(done / every) * every, done)
    jobs[j].lost += ran - kept
    jobs[j].served += ran
    jobs[j].work -= kept
    jobs[j].remaining -= kept
    jobs[j].stops += 1


@compiled
def requeue(q, j):
    """A preempted job takes its sequence number, and its key."""
    jobs, thresholds = q.jobs, q.thresholds
    if jobs[j].runs_in_level:
        jobs[j].runs_in_level = 0
        give_sequence(q, j, False)
    level = jobs[j].level
    while jobs[j].level < len(thresholds) and (
        jobs[j].served * weight(jobs, j, thresholds) >= thresholds[jobs[j].level, 0]
    ):
        jobs[j].level += 1
    if jobs[j].level > level:
        give_sequence(q, j, True)
    jobs[j].key = key(np.int64(q.rules[CODE]), jobs[j], jobs[j].remaining + q.rules[RESTART], jobs[j].served, q.rules)


@compiled
def weight(jobs, j, thresholds):
    """Service of a second."""
    return jobs[j].gpus if thresholds[0, 1] else 1.0


@compiled
def next_change(jobs, j, thresholds):
    """When a running job ends, or is demoted."""
    if jobs[j].level >= len(thresholds) or weight(jobs, j, thresholds) <= 0:
        return jobs[j].ends
    rest = thresholds[jobs[j].level, 0] / weight(jobs, j, thresholds) - jobs[j].served
    return min(jobs[j].ends, jobs[j].begins + rest)


@compiled
def sort_by_key(jobs, some, count):
    """Job numbers, the most important first."""
    for a in range(1, count):
        moved, b = some[a], a
        while b > 0:
            other = some[b - 1]
            if jobs[other].key < jobs[moved].key or (jobs[other].key == jobs[moved].key and other < moved):
                break
            some[b] = other
            b -= 1
        some[b] = moved
