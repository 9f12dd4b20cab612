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

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.index import FAN, NEVER, gather, update
from weft.cluster.engine.node import DETAILED, WRITTEN
from weft.cluster.engine.run import (
    ARRIVED,
    COMPLETED,
    NOBODY,
    PRIORITY,
    RUNNING,
    begin_waiting,
    end_waiting,
    enough,
    give_back,
    next_moment,
    place,
    pop_completion,
    push_completion,
    settle,
    why,
)
from weft.cluster.model import WHOLE

# A place of a job on a node: the next and the previous one on the same node (-1: none), its job, its kind of piece.
PLACE = np.dtype([(name, "i4") for name in ("next", "previous", "job", "piece")])
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


# ---- when a node will fit a piece ---------------------------------------------------------------------------------------


@compiled
def free_at(nodes, pieces, first, places, jobs, n, when):
    """GPUs, cores and memory free of node n once everything there has ended that should by ``when``."""
    gpus, cpu, memory = np.int64(nodes[n].free_gpus), nodes[n].free_cpu, nodes[n].free_memory
    slot = first[n]
    while slot >= 0:
        if jobs[places[slot].job].ends <= when:
            taken = pieces[places[slot].piece]
            gpus += taken.gpus
            cpu += taken.cpu
            memory += taken.memory
        slot = places[slot].next
    return gpus, cpu, memory


@compiled
def free_of_gpu_at(nodes, pieces, first, places, on, jobs, n, g, when):
    """The same of one GPU, in thousandths."""
    free = np.int64(nodes[n].milli[g])
    slot = first[n]
    while slot >= 0:
        if (on[slot] >> g) & 1 and jobs[places[slot].job].ends <= when:
            free += pieces[places[slot].piece].milli
        slot = places[slot].next
    return free


@compiled
def fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, when):
    """Whether node n fits a piece once everything there has ended that should by ``when``."""
    node, piece = nodes[n], pieces[p]
    if not (piece.types >> node.gpu_type) & 1 or (piece.gpu_memory > 0 and 0 <= node.gpu_memory < piece.gpu_memory):
        return False
    gpus, cpu, memory = free_at(nodes, pieces, first, places, jobs, n, when)
    if meta[DETAILED]:
        able = 0
        for g in range(node.gpus):
            free = free_of_gpu_at(nodes, pieces, first, places, on, jobs, n, g, when)
            able += free >= piece.milli
        gpus = able
    return gpus >= piece.gpus and (node.cpu < 0 or cpu >= piece.cpu) and (node.memory < 0 or memory >= piece.memory)


@compiled
def soonest(nodes, pieces, first, places, on, jobs, meta, n, p):
    """When node n will fit a piece of kind p by the estimates of what runs there: -inf now, inf never."""
    if fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, -np.inf):
        return -np.inf
    if not fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, np.inf):
        return np.inf
    low, high = np.inf, -np.inf  # it does not fit just before low, and it does at high
    slot = first[n]
    while slot >= 0:
        low, high = min(low, jobs[places[slot].job].ends), max(high, jobs[places[slot].job].ends)
        slot = places[slot].next
    if fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, low):
        return low
    while True:
        middle, found, gap = (low + high) / 2, np.inf, np.inf  # of the ends in between, the one nearest to their middle
        slot = first[n]
        while slot >= 0:
            ends = jobs[places[slot].job].ends
            if low < ends < high and abs(ends - middle) < gap:
                found, gap = ends, abs(ends - middle)
            slot = places[slot].next
        if found == np.inf:
            return high
        if fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, found):
            high = found
        else:
            low = found


@compiled
def refresh_soonest(nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, meta, p):
    """Brings the tree of kind p over (minus) the moments up to date."""
    written, since = meta[WRITTEN], read[p]
    read[p] = written
    if since < 0 or written - since > len(log):
        soon[p, :] = NEVER
        for n in range(len(nodes)):
            soon[p, n] = -soonest(nodes, pieces, first, places, on, jobs, meta, n, p)
        for level in range(len(levels) - 2):
            for group in range((levels[level + 1] - levels[level]) // FAN):
                gather(soon, ways, levels, p, level, group, False)
        return
    for entry in range(since, written):
        n = log[entry & (len(log) - 1)]
        value = -soonest(nodes, pieces, first, places, on, jobs, meta, n, p)
        if soon[p, n] != value:
            update(soon, ways, levels, p, n, value, False)


@compiled
def take_soonest(soon, ways, levels, p, promised, moments, have, count):
    """The ``count`` nodes that are first able to take kind p, lowest numbers first where equal, to ``promised[have:]``; those
    that are there already are passed over. Says how many there are now; -1 where there are not enough."""
    for i in range(have):
        moments[i] = soon[p, promised[i]]
        update(soon, ways, levels, p, promised[i], NEVER, False)
    total = have
    while total < have + count:
        k = levels[len(levels) - 2]
        top = soon[p, k]
        if top == NEVER:
            break
        for level in range(len(levels) - 3, -1, -1):
            k = levels[level] + (k - levels[level + 1]) * FAN
            while soon[p, k] != top:
                k += 1
        promised[total], moments[total] = k, top
        update(soon, ways, levels, p, k, NEVER, False)
        total += 1
    for i in range(total):
        update(soon, ways, levels, p, promised[i], moments[i], False)
    return total if total == have + count else -1


# ---- the promise --------------------------------------------------------------------------------------------------------


@compiled
def capacity_at(nodes, pieces, first, places, on, jobs, meta, n, p, when, most):
    """How many pieces of kind p, up to ``most``, node n takes at once when what should end by then has ended."""
    if not fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, when):
        return 0
    node, piece = nodes[n], pieces[p]
    gpus, cpu, memory = free_at(nodes, pieces, first, places, jobs, n, when)
    if meta[DETAILED]:
        gpus = np.int64(0)
        for g in range(node.gpus):
            free = free_of_gpu_at(nodes, pieces, first, places, on, jobs, n, g, when)
            gpus += free // piece.milli if piece.gpus == 1 else free >= piece.milli
    if piece.milli < WHOLE and piece.gpus > 1:
        most = 1  # how many more depends on which GPUs they take
    if piece.gpus > 0:
        most = min(most, gpus // piece.gpus)
    if node.cpu >= 0 and piece.cpu > 0:
        most = min(most, cpu // piece.cpu)
    if node.memory >= 0 and piece.memory > 0:
        most = min(most, memory // piece.memory)
    return most


@compiled
def promise(
    nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, running, progress, meta, classes, c, promised, held,
    moments,
):  # fmt: skip
    """Fills ``promised`` with the nodes for a job of class c and ``held`` with how many of its pieces each is to take (the last
    one's may be the remainder): how many nodes, and the moment."""
    p, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    refresh_soonest(nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, meta, p)
    if classes[c].shared and count > 1:
        return promise_shared(
            nodes, pieces, soon, first, places, on, jobs, running, progress, meta, p, count, promised, held
        )
    total = take_soonest(soon, ways, levels, p, promised, moments, 0, count)
    shadow = -np.inf
    for i in range(total):
        shadow = max(shadow, -moments[i])
        held[i] = 1
    if rest >= 0 and total >= 0:
        refresh_soonest(nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, meta, rest)
        total = take_soonest(soon, ways, levels, rest, promised, moments, total, 1)
        if total >= 0:
            shadow, held[total - 1] = max(shadow, -moments[total - 1]), 1
    return total, shadow


@compiled
def promise_shared(
    nodes, pieces, soon, first, places, on, jobs, running, progress, meta, p, count, promised, held
):  # fmt: skip
    """The same for pieces that may lie on one node: the first moment at which all nodes together take them all."""
    ends = np.empty(progress[RUNNING])
    for i in range(progress[RUNNING]):
        ends[i] = jobs[running[i].job].ends
    ends.sort()
    low, high = -1, len(ends) - 1  # not all fit at ends[low]; at the last end they do, as in an empty cluster
    while high - low > 1:
        middle, able = (low + high) // 2, 0
        for n in range(len(nodes)):
            able += capacity_at(nodes, pieces, first, places, on, jobs, meta, n, p, ends[middle], count)
        if able >= count:
            high = middle
        else:
            low = middle
    shadow = ends[high]
    order = np.argsort(-soon[p, : len(nodes)], kind="mergesort")
    total, left = np.int64(0), count
    for n in order:
        able = min(left, capacity_at(nodes, pieces, first, places, on, jobs, meta, n, p, shadow, left))
        if able > 0:
            promised[total], held[total] = n, able
            total += 1
            left -= able
        if left == 0:
            break
    return total, shadow


@compiled
def hold(nodes, pieces, log, first, places, jobs, meta, classes, c, promised, held, total, shadow):
    """Writes on each promised node what jobs that outlast the shadow time may take of it."""
    for i in range(total):
        n = promised[i]
        last = classes[c].rest >= 0 and i == total - 1
        piece = pieces[classes[c].rest if last else classes[c].piece]
        gpus, cpu, memory = free_at(nodes, pieces, first, places, jobs, n, shadow)
        nodes[n].held = 1
        nodes[n].spare_gpus = gpus - held[i] * piece.gpus if not meta[DETAILED] else -1  # -1: nothing at all
        nodes[n].spare_cpu = cpu - held[i] * piece.cpu
        nodes[n].spare_memory = memory - held[i] * piece.memory
        changed(log, meta, n)


@compiled
def let_go(nodes, log, meta, promised, total):
    for i in range(total):
        nodes[promised[i]].held = 0
        changed(log, meta, promised[i])


@compiled
def changed(log, meta, n):
    log[meta[WRITTEN] & (len(log) - 1)] = n
    meta[WRITTEN] += 1


# ---- the loop -----------------------------------------------------------------------------------------------------------


@compiled
def settle_on(first, places, where, slot, count, job, piece, rest):
    """Enters a started job in the lists of its nodes."""
    for i in range(slot, slot + count):
        n = where[i]
        places[i].job, places[i].previous, places[i].next = job, -1, first[n]
        places[i].piece = rest if rest >= 0 and i == slot + count - 1 else piece
        if first[n] >= 0:
            places[first[n]].previous = i
        first[n] = i


@compiled
def leave(first, places, where, slot, count):
    for i in range(slot, slot + count):
        before, after = places[i].previous, places[i].next
        if before >= 0:
            places[before].next = after
        else:
            first[where[i]] = after
        if after >= 0:
            places[after].previous = before


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
                made[NODES], shadow = promise(
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
