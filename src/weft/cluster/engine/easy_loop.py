"""The event loop of EASY backfill (Lifka 1995): the head of the queue has a reservation, and no job that starts may
delay it.

When the head of the queue does not fit, the nodes that will be first able to take it are reserved, by the estimates of
what runs there, from the time when the last of them is (its *shadow time*). A job behind it may start if it fits now
and either ends by then, by its own estimate, or leaves the reserved nodes what the head will need of them.

Waiting jobs of a class are in a tree of estimates, in the queue's order, so that the first one that is short enough is
found from its root.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine.allocate import enough, give_back, pieces_of, place
from weft.cluster.engine.compiled import compiled, entry
from weft.cluster.engine.easy_reservation import (
    ABOUT,
    CLASS_OF_HEAD,
    PLACED,
    RANK_OF_HEAD,
    SHADOW,
    Reservation,
    cancel,
    enter,
    leave,
    reserve,
)
from weft.cluster.engine.queues import (
    ARRIVED,
    COMPLETED,
    NO_RANK,
    RUNNING,
    next_event,
    pop_completion,
    push_completion,
)
from weft.cluster.engine.tables import Advance, Tables
from weft.cluster.engine.tree import FAN, NEVER
from weft.cluster.engine.wait_reasons import PRIORITY, begin_waiting, end_waiting, set_reason, why

NONE, SHORT_ONLY, ANY = range(3)  # which jobs of a class may be backfilled
LARGEST = np.finfo(np.float64).max


class Queue(NamedTuple):
    jobs: Any  # [J] queues.JOB
    running: Any  # the heap of completions
    progress: Any  # counters
    total: Any  # [C, reasons]: seconds that a class has waited for each reason
    waits: Any  # [J, reasons]: the same of a job
    by_class: Any  # jobs by class, and by rank in it
    tree: Any  # the estimates of waiting jobs, a tree for each class
    may: Any  # [C]: NONE, SHORT_ONLY or ANY


# ---- a tree of estimates over the jobs of a class --------------------------------------------------------------------


@compiled
def put(tree, begin, count, k, value):
    """Sets the k-th of ``count`` leaves at ``begin``, and the minima above it."""
    tree[begin + k] = value
    level, size = begin, count
    while size > 1:
        group = k // FAN
        first = level + group * FAN
        least = tree[first]
        for i in range(first + 1, min(first + FAN, level + size)):
            least = min(least, tree[i])
        level += size
        size = -(-size // FAN)
        if tree[level + group] == least:
            return
        tree[level + group] = least
        k = group


@compiled
def first_within(tree, begin, count, limit):
    """The first leaf that is no more than the limit, or -1."""
    depth, size = 0, count
    while size > 1:
        size = -(-size // FAN)
        depth += 1
    k = 0
    for height in range(depth, -1, -1):
        level, size = begin, count
        for _ in range(height):
            level += size
            size = -(-size // FAN)
        if height == depth:
            if not tree[level] <= limit:
                return -1
            continue
        k *= FAN
        while not tree[level + k] <= limit:
            k += 1
    return k


# ---- the loop --------------------------------------------------------------------------------------------------------


@compiled
def may_start(s, c):
    """Which jobs of class c fit now: any, only those that end by the shadow time, or none."""
    if s.classes[c].blocked:
        return NONE
    if enough(s, c + len(s.classes) // 2):
        return ANY
    return SHORT_ONLY if enough(s, c) else NONE


@compiled
def first_of(q, classes, c, limit):
    """The position in its class of the first waiting job of class c with an estimate within a limit, or -1."""
    return first_within(q.tree, classes[c].begin, classes[c].jobs, limit)


@entry
def advance(s, q, r, until, most):
    """Runs up to ``most`` event times, none after ``until``; says whether anything is left to happen.

    The second half of ``classes`` are the same ones for jobs that run beyond the shadow time; their pieces take of a
    reserved node only what it can spare.
    """
    classes, jobs, progress = s.classes, q.jobs, q.progress
    half = len(classes) // 2
    for _ in range(most):
        now = next_event(jobs, q.running, progress)
        if now == np.inf or now > until:
            return False
        freed = started = False
        q.may[:] = NONE
        while progress[RUNNING] and q.running[0].time == now:
            freed = True
            job = q.running[0].job
            c, slot = jobs[job].cls, jobs[job].slot
            pop_completion(q.running, progress)
            leave(r.first, r.placed, s.where, slot, pieces_of(classes, c))
            give_back(s, c, slot)
            progress[COMPLETED] += 1
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
            begin_waiting(classes, q.total, q.waits, c, job, now)
            put(q.tree, classes[c].begin, classes[c].jobs, jobs[job].place, jobs[job].estimate)
            classes[c].size += 1
            q.may[c] = ANY
            freed |= jobs[job].rank < r.about[RANK_OF_HEAD]
            progress[ARRIVED] += 1
        if freed and r.about[CLASS_OF_HEAD] >= 0:  # or there is another head
            cancel(s, r)
        shadow, head_class = r.about[SHADOW], np.int64(r.about[CLASS_OF_HEAD])
        for c in range(
            half if head_class >= 0 else 0
        ):  # the reservation holds: only new jobs may have become able to start
            if q.may[c] != NONE:
                q.may[c] = NONE
                if c != head_class:
                    q.may[c] = may_start(s, c)
        while True:
            head, c, k = NO_RANK, -1, -1
            for other in range(half):
                if classes[other].size == 0 or (head_class >= 0 and q.may[other] == NONE):
                    continue
                limit = shadow - now if head_class >= 0 and q.may[other] == SHORT_ONLY else LARGEST
                first = first_of(q, classes, other, limit)
                if first >= 0:
                    rank = jobs[q.by_class[classes[other].first + first]].rank
                    if rank < head:
                        head, c, k = rank, other, first
            if c < 0:
                break
            job = q.by_class[classes[c].first + k]
            beyond_shadow = head_class >= 0 and jobs[job].estimate > shadow - now
            slot = jobs[job].slot
            if place(s, c + half if beyond_shadow else c, slot):
                put(q.tree, classes[c].begin, classes[c].jobs, k, np.inf)
                classes[c].size -= 1
                end_waiting(classes, q.total, q.waits, c, job, now)
                jobs[job].start, jobs[job].ends = now, now + jobs[job].estimate
                started = True
                enter(s, r, c, job, slot)
                push_completion(q.running, progress, now + jobs[job].duration, job)
            elif head_class < 0:
                head_class = np.int64(c)
                reserve(s, r, c, head, now)
                shadow = r.about[SHADOW]
                for other in range(half):
                    q.may[other] = NONE
                    if classes[other].size and other != c:
                        q.may[other] = may_start(s, other)
            else:
                q.may[c] = SHORT_ONLY if beyond_shadow else NONE
        for c in range(half):
            reason = -1
            if classes[c].size:
                if classes[c].reason >= 0 and not started and (not freed or classes[c].reason == PRIORITY):
                    continue  # nothing changed for it: what fits still fits with what was freed
                reason = why(s, c, jobs[q.by_class[classes[c].first + first_of(q, classes, c, LARGEST)]].slot)
            set_reason(classes, q.total, c, reason, now)
    return True


def twice(pieces: NDArray[Any], classes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Kinds and classes once more, for jobs that run beyond the shadow time."""
    more, again = pieces.copy(), classes.copy()
    more["beyond_shadow"] = True
    again["piece"] += len(pieces)
    again["rest"] += np.where(again["rest"] >= 0, len(pieces), 0)
    return np.concatenate([pieces, more]), np.concatenate([classes, again])


def loop(t: Tables) -> Advance:
    """``advance(most)``. The tables have every kind and class twice."""
    table, s, of_rank = t.jobs, t.state, t.of_rank
    classes = s.classes
    by_class = of_rank[np.argsort(table["cls"][of_rank], kind="stable")]
    half, kinds = len(classes) // 2, len(s.pieces) // 2
    table["place"][by_class] = np.arange(len(table)) - classes["first"][table["cls"][by_class]]
    sizes = []
    for count in classes["jobs"][:half].tolist():
        sizes.append(count)
        while count > 1:
            count = -(-count // FAN)
            sizes[-1] += count
    classes["begin"][:half] = np.cumsum(sizes) - sizes
    most_pieces = int((classes["count"] + 1).max(initial=1))
    reserved, pieces = np.zeros((2, most_pieces), np.int64)
    r = Reservation(
        table, t.running, t.progress, np.full(len(s.nodes), -1, np.int32), np.zeros(len(s.where), PLACED),
        np.full((kinds, s.levels[-1]), NEVER), np.full(kinds, -1, np.int64), reserved, pieces, np.zeros(most_pieces),
        np.full(ABOUT, -1.0),
    )  # fmt: skip
    tree, may = np.full(sum(sizes), np.inf), np.zeros(half, np.int64)
    q = Queue(table, t.running, t.progress, t.total, t.waits, by_class, tree, may)
    return lambda most: advance(s, q, r, t.until, most)
