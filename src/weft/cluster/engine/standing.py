"""Who stands before whom, of orders that stop running jobs.

A waiting job has a key, which does not change while it waits. A running job's *standing* is its key as it would be now, written
so that it stays the same while time passes: for keys that fall with every second (time left) that is the sum of the key and
the moment. Keys that change otherwise are worked out anew at every moment at which someone asks.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine import run
from weft.cluster.engine.compiled import compiled, switch
from weft.cluster.order import FALLING, FREE, SETTLED
from weft.cluster.orders import ORDERS

# A job. `left`: seconds of its estimate that are not done; `work`: of its duration; `served`: seconds that it held its GPUs;
# `key`: while it waits its key, while it runs its standing; `level`: how many thresholds its service has passed; `turn` orders
# the jobs of a level, those that are `settled` (they run) first; `resume`: seconds that it needs before it works on. `begins`
# is when it started last, `ends` when it will end (NaN while it waits). `pending`: it was lifted off its nodes in this round,
# and its stretch is the one before that; `asked`: since then it has been asked once more.
JOB = np.dtype(
    [
        *run.JOB.descr,
        *((name, "f8") for name in ("left", "work", "served", "key", "gpus", "priority", "turn", "resume", "lost")),
        *((name, "i4") for name in ("level", "settled", "stops", "pending", "asked")),
    ]
)
# `progress` beyond the other loops': stretches so far, nodes written to `held`, pieces on nodes now, the last and the first
# turns that were given; of the round that is under way whether there is one, whether anything was freed and anyone started,
# and how many have been lifted and fallen.
STRETCHES, WRITTEN_PLACES, PLACED, LAST, FIRST, UNDER_WAY, CHANGED, STARTED, LIFTED, FALLEN, PROGRESS = range(
    run.PROGRESS, run.PROGRESS + 11
)
# `rules`: how standings change, the order's code, whether equal keys stop each other, seconds that a stopped job needs to go
# on, and between its checkpoints (0: it is saved when it is stopped), the moment, and whether single GPUs are looked at; then
# what the order knows of the trace.
# `thresholds` [levels, 2]: of service, and whether a second counts once for each GPU.
DRIFT, CODE, EQUALS, RESTART, EVERY, NOW, SINGLE = range(7)

key = switch("key", ("job", "left", "served", "known"), [o.preemption.key for o in ORDERS.values() if o.preemption])


@compiled
def wanted(jobs, j, rules, now):
    """What the standing of others is to be compared with for a waiting job."""
    return jobs[j].key + now if rules[DRIFT] == FALLING else jobs[j].key


@compiled
def stands_before(limit, j, standing, job, rules):
    """Whether waiting job j, which wants to stand at ``limit``, may stop a job."""
    return standing > limit or (rules[EQUALS] > 0 and standing == limit and job > j)


@compiled
def standing_at(jobs, j, rules, now):
    """A running job's standing."""
    return standing_anew(jobs, j, rules, now) if rules[DRIFT] == FREE else jobs[j].key


@compiled
def standing_anew(jobs, j, rules, now):
    ran = now - jobs[j].begins
    found = key(np.int64(rules[CODE]), jobs[j], jobs[j].left + jobs[j].resume - ran, jobs[j].served + ran, rules)
    return found + now if rules[DRIFT] == FALLING else found


@compiled
def give_turn(jobs, j, progress, last):
    """The last turn of its level, or the first of those who wait."""
    if last:
        progress[LAST] += 1
    else:
        progress[FIRST] -= 1
    turn = progress[LAST] if last else progress[FIRST]
    jobs[j].turn = turn - SETTLED if jobs[j].settled else turn


@compiled
def settle_down(jobs, j, rules, progress, now):
    """A job that runs takes its turn among those that run, and its standing."""
    if not jobs[j].settled:
        jobs[j].settled = 1
        give_turn(jobs, j, progress, True)
    jobs[j].key = standing_anew(jobs, j, rules, now)


@compiled
def fall(jobs, j, rules, progress, now):
    """A running job comes to the next level, and stands after all who wait there until the round is over."""
    jobs[j].level += 1
    jobs[j].settled = 0
    give_turn(jobs, j, progress, True)
    jobs[j].key = standing_anew(jobs, j, rules, now)


@compiled
def start(jobs, j, rules, progress, now):
    """A job begins a stretch."""
    jobs[j].resume = rules[RESTART] if jobs[j].stops else 0.0
    if not jobs[j].stops:
        jobs[j].start = now
    jobs[j].begins = now
    jobs[j].ends = now + (jobs[j].resume + jobs[j].work)
    settle_down(jobs, j, rules, progress, now)


@compiled
def lose_nodes(jobs, j, rules, now):
    """A lifted job is asked once more in this round, where it stands in the queue."""
    standing = standing_at(jobs, j, rules, now)
    jobs[j].key = standing - now if rules[DRIFT] == FALLING else standing
    jobs[j].ends = np.nan


@compiled
def go_on(jobs, j, rules, now):
    """It finds its own nodes again: nothing has happened to it."""
    jobs[j].key = standing_anew(jobs, j, rules, now)
    jobs[j].ends = jobs[j].begins + (jobs[j].resume + jobs[j].work)


@compiled
def end_stretch(jobs, j, rules, now):
    """It was stopped: what it keeps of its work."""
    ran = now - jobs[j].begins
    done = max(ran - jobs[j].resume, 0.0)
    kept = done if rules[EVERY] <= 0 else min(np.floor(done / rules[EVERY]) * rules[EVERY], done)
    jobs[j].lost += ran - kept
    jobs[j].served += ran
    jobs[j].work -= kept
    jobs[j].left -= kept
    jobs[j].stops += 1


@compiled
def queue_again(jobs, j, rules, thresholds, progress):
    """Its turn, and its key, from now on."""
    if jobs[j].settled:
        jobs[j].settled = 0
        give_turn(jobs, j, progress, False)
    level = jobs[j].level
    while jobs[j].level < len(thresholds) and (
        jobs[j].served * weight(jobs, j, thresholds) >= thresholds[jobs[j].level, 0]
    ):
        jobs[j].level += 1
    if jobs[j].level > level:
        give_turn(jobs, j, progress, True)
    jobs[j].key = key(np.int64(rules[CODE]), jobs[j], jobs[j].left + rules[RESTART], jobs[j].served, rules)


@compiled
def weight(jobs, j, thresholds):
    """Service of a second."""
    return jobs[j].gpus if thresholds[0, 1] else 1.0


@compiled
def next_event(jobs, j, thresholds):
    """When a job that runs ends, or comes to the next level."""
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
