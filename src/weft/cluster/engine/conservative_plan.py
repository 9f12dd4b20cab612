"""The plan of conservative backfill: what a node has free at every time, and when and where a job fits earliest.

Each node has its planned pieces, running or waiting ones, in two lists: in the order in which they begin and in that in
which they end. One walk along both meets every time at which something changes there.

A *window* of a node is a time throughout which so many of its GPUs are free. For every number of GPUs that jobs
request, and for each of some lengths, a tree over the nodes holds when the first window opens that is at least so long:
no job that requests as much for longer can begin there before. From its root the few nodes are found whose lists are
worth a walk.
"""

from typing import Any, NamedTuple

import numpy as np

from weft.cluster.engine.allocate import kind_of, pieces_of
from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import HIGHEST, PLACEMENT, RANDOM, TIES, accepts, below, score, times
from weft.cluster.engine.tree import FAN, NEVER, update
from weft.cluster.order import LEAST_S

# A piece on a node: when it begins and is expected to end, and its neighbours on that node in either order (-1: none).
BEGINS, ENDS = 0, 1
PLANNED = np.dtype([("time", "f8", (2,)), ("next", "i4", (2,)), ("previous", "i4", (2,)), ("piece", "i8")])
MOST_LENGTHS = 8


class Plan(NamedTuple):
    """A node that lost or gained a piece is in the list ``changed``, whose last entry is how many, until its windows
    are computed again. Otherwise what is free only gets less, by time and by jobs that run beyond their estimates, so
    that every time in ``opens`` is right or too early."""

    jobs: Any  # [J] queues.JOB
    first: Any  # [N, 2]: where the two lists of a node begin
    planned: Any  # beside `where`, PLANNED
    requested: Any  # numbers of GPUs; that of a piece is its `gpus_index`
    lengths: Any  # seconds, in order, the first no longer than any job
    # `opens` [numbers × lengths, entries]: minus the time at which a window opens, in a tree (tree.py); 0 where it had
    # opened by `computed` [N], when that was written; NEVER where there is no such window.
    opens: Any
    computed: Any
    changed: Any
    scratch: Any  # [2, numbers]
    ready: Any  # [N]: room for a time
    able: Any  # [N]: room for a node
    values: Any  # [N]: room for its score


# ---- what a node has free over time ----------------------------------------------------------------------------------


@compiled
def enter(s, plan, job, i):
    """Enters a job's i-th piece in the lists of its node."""
    first, planned, slot = plan.first, plan.planned, plan.jobs[job].slot + i
    n = s.where[slot]
    planned[slot].piece = kind_of(s.classes, plan.jobs[job].cls, i)
    planned[slot].time[BEGINS], planned[slot].time[ENDS] = plan.jobs[job].begins, plan.jobs[job].ends
    for order in range(2):
        before, after = np.int64(-1), np.int64(first[n, order])
        while after >= 0 and planned[after].time[order] <= planned[slot].time[order]:
            before, after = after, np.int64(planned[after].next[order])
        planned[slot].previous[order], planned[slot].next[order] = before, after
        if before >= 0:
            planned[before].next[order] = slot
        else:
            first[n, order] = slot
        if after >= 0:
            planned[after].previous[order] = slot
    mark_changed(plan, n)


@compiled
def leave(s, plan, slot):
    first, planned, n = plan.first, plan.planned, s.where[slot]
    for order in range(2):
        before, after = planned[slot].previous[order], planned[slot].next[order]
        if before >= 0:
            planned[before].next[order] = after
        else:
            first[n, order] = after
        if after >= 0:
            planned[after].previous[order] = before


@compiled
def begin_walk(s, plan, n, now):
    """Where both lists begin, and what node n has: pieces past their estimates may run for ever, and are skipped."""
    b, e = np.int64(plan.first[n, BEGINS]), np.int64(plan.first[n, ENDS])
    while e >= 0 and plan.planned[e].time[ENDS] <= now:
        e = np.int64(plan.planned[e].next[ENDS])
    return b, e, np.int64(s.nodes[n].gpus), s.nodes[n].cpu, s.nodes[n].memory


@compiled
def walk(s, plan, b, e, time, gpus, cpu, memory):
    """On to a time: where that is in both lists, and what is free then."""
    planned, pieces = plan.planned, s.pieces
    while b >= 0 and planned[b].time[BEGINS] <= time:
        piece = planned[b].piece
        gpus -= pieces[piece].gpus
        cpu -= pieces[piece].cpu
        memory -= pieces[piece].memory
        b = np.int64(planned[b].next[BEGINS])
    while e >= 0 and planned[e].time[ENDS] <= time:
        piece = planned[e].piece
        gpus += pieces[piece].gpus
        cpu += pieces[piece].cpu
        memory += pieces[piece].memory
        e = np.int64(planned[e].next[ENDS])
    return b, e, gpus, cpu, memory


@compiled
def change_after(planned, b, e):
    """The next time at which something begins or ends; inf never."""
    time = np.inf
    if b >= 0:
        time = planned[b].time[BEGINS]
    if e >= 0:
        time = min(time, planned[e].time[ENDS])
    return time


@compiled
def least_free(s, plan, n, begin, end, now):
    """What is free of node n throughout a time: GPUs, cores, memory."""
    b, e, gpus, cpu, memory = begin_walk(s, plan, n, now)
    b, e, gpus, cpu, memory = walk(s, plan, b, e, begin, gpus, cpu, memory)
    least_gpus, least_cpu, least_memory = gpus, cpu, memory
    while True:
        time = change_after(plan.planned, b, e)
        if time >= end:
            return least_gpus, least_cpu, least_memory
        b, e, gpus, cpu, memory = walk(s, plan, b, e, time, gpus, cpu, memory)
        least_gpus, least_cpu, least_memory = min(least_gpus, gpus), min(least_cpu, cpu), min(least_memory, memory)


@compiled
def capacity(s, plan, n, p, begin, end, now):
    """How many pieces of kind p node n takes throughout a time."""
    node, piece = s.nodes[n], s.pieces[p]
    if not accepts(node, piece):
        return 0
    gpus, cpu, memory = least_free(s, plan, n, begin, end, now)
    return max(times(node, piece, np.int64(1 << 30), gpus, cpu, memory), 0)


@compiled
def earliest_on(s, plan, n, p, since, limit, length, now):
    """The earliest time from ``since`` on, and before ``limit``, from which node n takes a piece of kind p for so long:
    the limit where there is none."""
    node, piece = s.nodes[n], s.pieces[p]
    if not accepts(node, piece):
        return limit
    b, e, gpus, cpu, memory = begin_walk(s, plan, n, now)
    time, opened = since, np.inf
    while True:
        b, e, gpus, cpu, memory = walk(s, plan, b, e, time, gpus, cpu, memory)
        fits = gpus >= piece.gpus
        fits &= (node.cpu < 0 or cpu >= piece.cpu) and (node.memory < 0 or memory >= piece.memory)
        following = change_after(plan.planned, b, e)
        if fits:
            opened = min(opened, time)
            if opened + length <= following:
                return min(opened, limit)
        else:
            opened = np.inf
            if following >= limit:
                return limit
        time = following


# ---- windows ---------------------------------------------------------------------------------------------------------


@compiled
def mark_changed(plan, n):
    if plan.computed[n] > NEVER:
        plan.computed[n] = NEVER
        plan.changed[plan.changed[-1]] = n
        plan.changed[-1] += 1


@compiled
def compute_windows(s, plan, n, now):
    """Writes down the first windows of node n."""
    lengths = plan.lengths
    plan.computed[n] = now
    since, filled = plan.scratch[0], plan.scratch[1]
    since[:], filled[:] = np.inf, 0
    b, e, gpus, cpu, memory = begin_walk(s, plan, n, now)
    time = now
    while time < np.inf:
        b, e, gpus, cpu, memory = walk(s, plan, b, e, time, gpus, cpu, memory)
        following = change_after(plan.planned, b, e)
        for i in range(len(plan.requested)):
            if gpus < plan.requested[i]:
                since[i] = np.inf
                continue
            since[i] = min(since[i], time)
            for k in range(np.int64(filled[i]), len(lengths)):
                if since[i] + lengths[k] > following:
                    break
                set_window(s, plan, i * len(lengths) + k, n, -since[i] if since[i] > now else 0.0)
                filled[i] += 1
        time = following
    for i in range(len(plan.requested)):
        for k in range(np.int64(filled[i]), len(lengths)):
            set_window(s, plan, i * len(lengths) + k, n, NEVER)


@compiled
def set_window(s, plan, row, n, value):
    if plan.opens[row, n] != value:
        update(plan.opens, s.ways, s.levels, row, n, value, False)


@compiled
def refresh_windows(s, plan, now):
    for i in range(plan.changed[-1]):
        compute_windows(s, plan, plan.changed[i], now)
    plan.changed[-1] = 0


@compiled
def row_of(s, plan, p, length):
    """The row of `opens` for a piece of kind p for so long."""
    k = 0
    while k + 1 < len(plan.lengths) and plan.lengths[k + 1] <= length:
        k += 1
    return s.pieces[p].gpus_index * len(plan.lengths) + k


@compiled
def next_above(opens, levels, row, n, bar):
    """The first node from n on whose entry is above a bar; -1 where there is none."""
    level, k = 0, n
    while k < levels[level + 1] - levels[level]:
        if opens[row, levels[level] + k] > bar:
            if level == 0:
                return k
            level -= 1
            k *= FAN
            continue
        k += 1
        while k % FAN == 0 and level < len(levels) - 2:
            level += 1
            k //= FAN
    return -1


@compiled
def highest(opens, levels, row):
    """A node with the highest entry."""
    k = 0
    for level in range(len(levels) - 3, -1, -1):
        k *= FAN
        while opens[row, levels[level] + k] != opens[row, levels[-2]]:
            k += 1
    return k


# ---- when and where a job fits earliest ------------------------------------------------------------------------------


@compiled
def enough_at(s, plan, p, count, rest, shared, begin, length, now):
    """Whether all pieces of a job fit throughout a time."""
    bar, able = np.nextafter(-begin, -np.inf), 0
    row = row_of(s, plan, p, length)
    n = next_above(plan.opens, s.levels, row, 0, bar)
    while n >= 0 and able < count:
        fits = capacity(s, plan, n, p, begin, begin + length, now)
        able += fits if shared else min(fits, 1)
        n = next_above(plan.opens, s.levels, row, n + 1, bar)
    if able < count or rest < 0:
        return able >= count
    able, row = 0, row_of(s, plan, rest, length)
    n = next_above(plan.opens, s.levels, row, 0, bar)
    while n >= 0 and able <= count:
        able += min(capacity(s, plan, n, rest, begin, begin + length, now), 1)
        n = next_above(plan.opens, s.levels, row, n + 1, bar)
    return able > count


@compiled
def earliest_of_count(s, plan, p, count, since, length, now):
    """When the ``count``-th node is first able to take a piece of kind p for so long, from ``since`` on; inf never."""
    ready, row = plan.ready, row_of(s, plan, p, length)
    found, limit = 0, np.inf  # `ready`: the earliest of these times so far, in order
    guess = count == 1
    n = highest(plan.opens, s.levels, row) if guess else next_above(plan.opens, s.levels, row, 0, NEVER)
    while 0 <= n < len(s.nodes):
        time = earliest_on(s, plan, n, p, since, limit, length, now)
        if time > max(-plan.opens[row, n], since) and plan.computed[n] < now:
            compute_windows(s, plan, n, now)
        if time < limit:
            k = found if found < count else count - 1
            found = min(found + 1, count)
            while k > 0 and ready[k - 1] > time:
                ready[k] = ready[k - 1]
                k -= 1
            ready[k] = time
            if found == count:
                limit = ready[count - 1]
                if limit <= since:
                    return limit
        n = next_above(plan.opens, s.levels, row, 0 if guess else n + 1, -limit)
        guess = False
    return limit


@compiled
def earliest_for(s, plan, p, count, rest, shared, length, now):
    """The earliest time from now on at which all pieces fit for so long."""
    time = now
    while True:
        # No earlier than when so many nodes are able to take one.
        found = np.inf
        if shared or count <= len(s.nodes):
            found = earliest_of_count(s, plan, p, 1 if shared else count, time, length, now)
        if found == np.inf or (count == 1 and rest < 0):
            return found
        if enough_at(s, plan, p, count, rest, shared, found, length, now):
            return found
        if found > time:
            time = found
            continue
        later = np.inf  # the next end of anything anywhere
        for n in range(len(s.nodes)):
            e = begin_walk(s, plan, n, time)[1]
            if e >= 0:
                later = min(later, plan.planned[e].time[ENDS])
        if later == np.inf:
            return np.inf
        time = later


@compiled
def score_at(s, plan, n, p, begin, end, now):
    """The placement's score of node n for a piece of kind p, by the least that is free throughout a time: NEVER where
    it does not fit."""
    node, piece = s.nodes[n], s.pieces[p]
    if not accepts(node, piece):
        return NEVER
    gpus, cpu, memory = least_free(s, plan, n, begin, end, now)
    if gpus < piece.gpus or (node.cpu >= 0 and cpu < piece.cpu) or (node.memory >= 0 and memory < piece.memory):
        return NEVER
    free_gpus, free_cpu, free_memory = node.free_gpus, node.free_cpu, node.free_memory
    node.free_gpus, node.free_cpu, node.free_memory = gpus, cpu, memory
    value = score(s.meta[PLACEMENT], piece, node, s.context)
    node.free_gpus, node.free_cpu, node.free_memory = free_gpus, free_cpu, free_memory
    return value


@compiled
def able_at(s, plan, p, begin, length, now):
    """Writes the nodes that take a piece of kind p from a time on for so long to ``able``, and their scores to
    ``values``: how many."""
    count, bar, row = 0, np.nextafter(-begin, -np.inf), row_of(s, plan, p, length)
    n = next_above(plan.opens, s.levels, row, 0, bar)
    while n >= 0:
        value = score_at(s, plan, n, p, begin, begin + length, now)
        if value > NEVER:
            plan.able[count], plan.values[count] = n, value
            count += 1
        n = next_above(plan.opens, s.levels, row, n + 1, bar)
    return count


@compiled
def best_of(values, count, meta):
    """Which of these is the highest, ties by the rule; -1 where all are NEVER."""
    top, chosen, equal = NEVER, np.int64(-1), 0
    for k in range(count):
        if values[k] > top or (values[k] == top and top > NEVER and meta[TIES] == HIGHEST):
            equal = 1 if values[k] > top else equal + 1
            top, chosen = values[k], np.int64(k)
        elif values[k] == top:
            equal += 1
    if meta[TIES] != RANDOM or chosen < 0:
        return chosen
    skip = below(meta, equal)
    for k in range(count):
        if values[k] == top:
            if skip == 0:
                return np.int64(k)
            skip -= 1
    return chosen


@compiled
def plan_job(s, plan, job, now):
    """Plans a job at the earliest time and enters it in the lists of its nodes, or nowhere (time inf)."""
    jobs, c = plan.jobs, plan.jobs[job].cls
    slot, count, rest, shared = jobs[job].slot, s.classes[c].count, s.classes[c].rest, s.classes[c].shared
    length = max(jobs[job].estimate, LEAST_S)
    refresh_windows(s, plan, now)
    time = earliest_for(s, plan, s.classes[c].piece, count, rest, shared and count > 1, length, now)
    jobs[job].begins, jobs[job].ends = time, time + length
    if time == np.inf:
        return
    candidates = 0
    for i in range(pieces_of(s.classes, c)):
        kind = kind_of(s.classes, c, i)
        if i == 0 or i == count:
            candidates = able_at(s, plan, kind, time, length, now)
        if i == count:
            for k in range(candidates):
                for other in range(slot, slot + count):
                    if s.where[other] == plan.able[k]:  # it may not hold two pieces
                        plan.values[k] = NEVER
        k = best_of(plan.values, candidates, s.meta)
        s.where[slot + i] = plan.able[k]
        enter(s, plan, job, i)
        plan.values[k] = NEVER
        if shared:
            plan.values[k] = score_at(s, plan, plan.able[k], kind, time, time + length, now)
