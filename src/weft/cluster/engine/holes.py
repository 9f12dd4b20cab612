"""When and where a job fits earliest, by the plan of what stays on each node (engine/timeline.py).

A *hole* of a node is a time throughout which so many of its GPUs are free. For every number of GPUs that jobs ask, and for each
of some lengths, a tree over the nodes holds when the first hole opens that is at least so long: no job that asks as much for
longer can begin there before. From its root the few nodes are found that are worth a walk along their stays.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import HIGHEST, PLACEMENT, RANDOM, TIES, below, score
from weft.cluster.engine.timeline import ENDS, begin_walk, change_after, least, room_for, soonest, suits, walk
from weft.cluster.engine.tree import FAN, NEVER, update

# `asked` [numbers]: so many GPUs, a piece's is its `level`; `spans` [lengths]: seconds, in order, the first no longer than any
# job. `opens` [numbers × lengths, entries]: minus the moment, in a tree (tree.py); 0 where it had opened by `looked` [N], when
# that was written; NEVER where there is no such hole. A node that has lost a stay, or gained one, since is in the list
# `changed`, whose last entry is how many. What is free otherwise only gets less, by time and by those who stay beyond their
# estimates, so that every moment that is written is right or too early.
MOST_SPANS = 8


@compiled
def mark(looked, changed, n):
    """Node n has changed."""
    if looked[n] > NEVER:
        looked[n] = NEVER
        changed[changed[-1]] = n
        changed[-1] += 1


@compiled
def look(nodes, pieces, first, stays, asked, spans, opens, looked, scratch, ways, levels, n, now):
    """Writes down the first holes of node n. ``scratch`` [2, numbers]."""
    looked[n] = now
    since, filled = scratch[0], scratch[1]
    since[:], filled[:] = np.inf, 0
    b, e, gpus, cpu, memory = begin_walk(nodes, first, stays, n, now)
    moment = now
    while moment < np.inf:
        b, e, gpus, cpu, memory = walk(stays, pieces, b, e, moment, gpus, cpu, memory)
        following = change_after(stays, b, e)
        for level in range(len(asked)):
            if gpus < asked[level]:
                since[level] = np.inf
                continue
            since[level] = min(since[level], moment)
            for k in range(np.int64(filled[level]), len(spans)):
                if since[level] + spans[k] > following:
                    break
                note(opens, ways, levels, level * len(spans) + k, n, -since[level] if since[level] > now else 0.0)
                filled[level] += 1
        moment = following
    for level in range(len(asked)):
        for k in range(np.int64(filled[level]), len(spans)):
            note(opens, ways, levels, level * len(spans) + k, n, NEVER)


@compiled
def note(opens, ways, levels, row, n, value):
    if opens[row, n] != value:
        update(opens, ways, levels, row, n, value, False)


@compiled
def look_at_changed(nodes, pieces, first, stays, asked, spans, opens, looked, changed, scratch, ways, levels, now):
    for i in range(changed[-1]):
        look(nodes, pieces, first, stays, asked, spans, opens, looked, scratch, ways, levels, changed[i], now)
    changed[-1] = 0


@compiled
def row_of(pieces, spans, p, length):
    """The row of `opens` for a piece of kind p that stays for so long."""
    k = 0
    while k + 1 < len(spans) and spans[k + 1] <= length:
        k += 1
    return pieces[p].level * len(spans) + k


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


@compiled
def enough_at(nodes, pieces, first, stays, spans, opens, levels, p, count, rest, shared, begin, length, now):
    """Whether all pieces of a job fit throughout two moments."""
    bar, able = np.nextafter(-begin, -np.inf), 0
    row = row_of(pieces, spans, p, length)
    n = next_above(opens, levels, row, 0, bar)
    while n >= 0 and able < count:
        fits = room_for(nodes, pieces, first, stays, n, p, begin, begin + length, now)
        able += fits if shared else min(fits, 1)
        n = next_above(opens, levels, row, n + 1, bar)
    if able < count or rest < 0:
        return able >= count
    able, row = 0, row_of(pieces, spans, rest, length)
    n = next_above(opens, levels, row, 0, bar)
    while n >= 0 and able <= count:
        able += min(room_for(nodes, pieces, first, stays, n, rest, begin, begin + length, now), 1)
        n = next_above(opens, levels, row, n + 1, bar)
    return able > count


@compiled
def least_moment(
    nodes, pieces, first, stays, asked, spans, opens, looked, scratch, ways, levels, ready, p, count, since, length, now
):  # fmt: skip
    """When the ``count``-th node is first able to take a piece of kind p for so long, from ``since`` on; inf never."""
    row = row_of(pieces, spans, p, length)
    found, limit = 0, np.inf  # `ready`: the earliest of these moments so far, in order
    guess = count == 1
    n = highest(opens, levels, row) if guess else next_above(opens, levels, row, 0, NEVER)
    while 0 <= n < len(nodes):
        moment = soonest(nodes, pieces, first, stays, n, p, since, limit, length, now)
        if moment > max(-opens[row, n], since) and looked[n] < now:
            look(nodes, pieces, first, stays, asked, spans, opens, looked, scratch, ways, levels, n, now)
        if moment < limit:
            k = found if found < count else count - 1
            found = min(found + 1, count)
            while k > 0 and ready[k - 1] > moment:
                ready[k] = ready[k - 1]
                k -= 1
            ready[k] = moment
            if found == count:
                limit = ready[count - 1]
                if limit <= since:
                    return limit
        n = next_above(opens, levels, row, 0 if guess else n + 1, -limit)
        guess = False
    return limit


@compiled
def moment_for(
    nodes, pieces, first, stays, asked, spans, opens, looked, scratch, ways, levels, ready, p, count, rest, shared, length, now
):  # fmt: skip
    """The earliest moment from now on at which all pieces fit for so long; ``ready`` is room for a number a node."""
    moment = now
    while True:
        # No earlier than when so many nodes are able to take one.
        found = np.inf
        if shared or count <= len(nodes):
            found = least_moment(
                nodes, pieces, first, stays, asked, spans, opens, looked, scratch, ways, levels, ready, p,
                1 if shared else count, moment, length, now,
            )  # fmt: skip
        if found == np.inf or (count == 1 and rest < 0):
            return found
        if enough_at(nodes, pieces, first, stays, spans, opens, levels, p, count, rest, shared, found, length, now):
            return found
        if found > moment:
            moment = found
            continue
        later = np.inf  # the next end of anything anywhere
        for n in range(len(nodes)):
            e = begin_walk(nodes, first, stays, n, moment)[1]
            if e >= 0:
                later = min(later, stays[e].moment[ENDS])
        if later == np.inf:
            return np.inf
        moment = later


@compiled
def value_of(nodes, pieces, meta, context, first, stays, n, p, begin, end, now):
    """What the placement thinks of node n for a piece of kind p, by the least that is free throughout two moments: NEVER where
    it does not fit."""
    node, piece = nodes[n], pieces[p]
    if not suits(node, piece):
        return NEVER
    gpus, cpu, memory = least(nodes, pieces, first, stays, n, begin, end, now)
    if gpus < piece.gpus or (node.cpu >= 0 and cpu < piece.cpu) or (node.memory >= 0 and memory < piece.memory):
        return NEVER
    free_gpus, free_cpu, free_memory = node.free_gpus, node.free_cpu, node.free_memory
    node.free_gpus, node.free_cpu, node.free_memory = gpus, cpu, memory
    value = score(meta[PLACEMENT], piece, node, context)
    node.free_gpus, node.free_cpu, node.free_memory = free_gpus, free_cpu, free_memory
    return value


@compiled
def able_at(nodes, pieces, meta, context, first, stays, spans, opens, levels, able, values, p, begin, length, now):
    """Writes the nodes that take a piece of kind p from a moment on for so long to ``able``, and to ``values`` what the
    placement thinks of them: how many."""
    count, bar, row = 0, np.nextafter(-begin, -np.inf), row_of(pieces, spans, p, length)
    n = next_above(opens, levels, row, 0, bar)
    while n >= 0:
        value = value_of(nodes, pieces, meta, context, first, stays, n, p, begin, begin + length, now)
        if value > NEVER:
            able[count], values[count] = n, value
            count += 1
        n = next_above(opens, levels, row, n + 1, bar)
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
    left = below(meta, equal)
    for k in range(count):
        if values[k] == top:
            if left == 0:
                return np.int64(k)
            left -= 1
    return chosen
