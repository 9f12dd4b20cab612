"""The event loop of EASY backfill (Lifka 1995): who comes first gets a reservation, and nobody who passes may delay it.

When the head of the queue does not fit, it is promised the nodes that will first be able to take it, by the estimates of what
runs there, at the moment when the last of them is (its *shadow time*). A job behind it may start if it fits now and either ends
by then, by its own estimate, or leaves the promised nodes what the head will need of them.

For the promise there is a tree for each kind of piece over the moments at which nodes will fit it, and a list for each node of
what runs there. Waiting jobs lie in a tree of estimates for each class, in the queue's order, so that the first one that is
short enough is found from its root.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.allocate import enough, give_back, place
from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.promise import hold, leave, let_go, settle_on
from weft.cluster.engine.rack_promise import promise_for
from weft.cluster.engine.reasons import PRIORITY, begin_waiting, end_waiting, settle, why
from weft.cluster.engine.run import ARRIVED, COMPLETED, NOBODY, RUNNING, next_moment, pop_completion, push_completion
from weft.cluster.engine.tree import FAN

NONE, SHORT_ONLY, ANY = range(3)  # which jobs of a class may pass
# A promise: the number of its nodes, its shadow time, the class and the rank of the head that it is for (-1: there is none).
NODES, SHADOW, CLASS_OF_HEAD, RANK_OF_HEAD, PROMISE = range(5)


# ---- a tree of estimates over the jobs of a class ----------------------------------------------------------------------


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


# ---- the loop -----------------------------------------------------------------------------------------------------------


@compiled
def allowed(nodes, pieces, best, ways, levels, log, meta, context, classes, c, outlasting):
    """Which jobs of class c fit now: any, only those that end by the shadow time, or none."""
    if classes[c].blocked:
        return NONE
    if enough(nodes, pieces, best, ways, levels, log, meta, context, classes, outlasting):
        return ANY
    return SHORT_ONLY if enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c) else NONE


@compiled
def advance(
    jobs, by_class, tree, running, progress, where, on, first, places, soon, read, promised, held, moments, may, made,
    nodes, pieces, best, ways, levels, log, meta, context, room, classes, total, waits, until, most,
):  # fmt: skip
    """Runs up to ``most`` moments, none after ``until``; says whether anything is left to happen.

    The second half of ``classes`` are the same ones for jobs that outlast the shadow time; their pieces fit a held node only in
    what it can spare.
    """
    half = len(classes) // 2
    for _ in range(most):
        now = next_moment(jobs, running, progress)
        if now == np.inf or now > until:
            return False
        freed = started = False
        may[:] = NONE
        while progress[RUNNING] and running[0].time == now:
            freed = True
            job = running[0].job
            c, slot = jobs[job].cls, jobs[job].slot
            pop_completion(running, progress)
            leave(first, places, where, slot, classes[c].count + (classes[c].rest >= 0))
            give_back(nodes, pieces, log, meta, room, classes, c, where, on, slot)
            progress[COMPLETED] += 1
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, c = progress[ARRIVED], jobs[progress[ARRIVED]].cls
            begin_waiting(classes, total, waits, c, job, now)
            put(tree, classes[c].begin, classes[c].jobs, jobs[job].place, jobs[job].estimate)
            classes[c].size += 1
            may[c] = ANY
            freed |= jobs[job].rank < made[RANK_OF_HEAD]
            progress[ARRIVED] += 1
        if freed and made[CLASS_OF_HEAD] >= 0:  # or there is another head
            let_go(nodes, log, meta, promised, np.int64(made[NODES]))
            made[CLASS_OF_HEAD] = made[RANK_OF_HEAD] = -1
        shadow, blocked = made[SHADOW], np.int64(made[CLASS_OF_HEAD])
        for c in range(half if blocked >= 0 else 0):  # the promise holds: only newcomers may have become able to pass
            if may[c] != NONE:
                may[c] = NONE
                if c != blocked:
                    may[c] = allowed(nodes, pieces, best, ways, levels, log, meta, context, classes, c, c + half)
        while True:
            head, c = NOBODY, -1
            for other in range(half):
                if classes[other].size == 0 or (blocked >= 0 and may[other] == NONE):
                    continue
                limit = shadow - now if blocked >= 0 and may[other] == SHORT_ONLY else np.finfo(np.float64).max
                k = first_within(tree, classes[other].begin, classes[other].jobs, limit)
                if k >= 0:
                    rank = jobs[by_class[classes[other].first + k]].rank
                    if rank < head:
                        head, c = rank, other
            if c < 0:
                break
            k = first_within(
                tree,
                classes[c].begin,
                classes[c].jobs,
                shadow - now if blocked >= 0 and may[c] == SHORT_ONLY else np.finfo(np.float64).max,
            )
            job = by_class[classes[c].first + k]
            outlasts = blocked >= 0 and jobs[job].estimate > shadow - now
            kind, slot = c + half if outlasts else c, jobs[job].slot
            if place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, kind, where, on, slot):
                put(tree, classes[c].begin, classes[c].jobs, k, np.inf)
                classes[c].size -= 1
                end_waiting(classes, total, waits, c, job, now)
                jobs[job].start, jobs[job].ends = now, now + jobs[job].estimate
                started = True
                settle_on(
                    first,
                    places,
                    where,
                    slot,
                    classes[c].count + (classes[c].rest >= 0),
                    job,
                    classes[c].piece,
                    classes[c].rest,
                )
                push_completion(running, progress, now + jobs[job].duration, job)
            elif blocked < 0:
                blocked = np.int64(c)
                made[NODES], shadow = promise_for(
                    nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, running, progress, meta,
                    classes, c, promised, held, moments,
                )  # fmt: skip
                shadow = max(shadow, now)
                made[SHADOW], made[CLASS_OF_HEAD], made[RANK_OF_HEAD] = shadow, c, head
                hold(
                    nodes, pieces, log, first, places, jobs, meta, classes, c, promised, held, np.int64(made[NODES]), shadow
                )  # fmt: skip
                for other in range(half):
                    may[other] = NONE
                    if classes[other].size and other != c:
                        may[other] = allowed(
                            nodes, pieces, best, ways, levels, log, meta, context, classes, other, other + half
                        )
            else:
                may[c] = SHORT_ONLY if outlasts else NONE
        for c in range(half):
            reason = -1
            if classes[c].size:
                if classes[c].reason >= 0 and not started and (not freed or classes[c].reason == PRIORITY):
                    continue  # nothing changed for it: what fits fits the better for what was freed
                k = first_within(tree, classes[c].begin, classes[c].jobs, np.finfo(np.float64).max)
                slot = jobs[by_class[classes[c].first + k]].slot
                reason = why(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot)
            if reason != classes[c].reason:
                settle(classes, total, c, now)
                classes[c].reason = reason
    return True
