"""What the head of the queue is promised under EASY backfill where its pieces need one rack, compiled (``weft.cluster.promise``
is the plain form of it): the rack that will first take all of them."""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import allocating, compiled
from weft.cluster.engine.node import RACKS, TOPOLOGY
from weft.cluster.engine.promise import capacity_at, promise, refresh_soonest
from weft.cluster.engine.run import RUNNING
from weft.cluster.engine.tree import NEVER
from weft.cluster.placement import REQUIRED


@allocating
def promise_for(
    nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, running, progress, meta, classes, c, promised, held,
    moments,
):  # fmt: skip
    """As :func:`promise`, and for a job of several pieces in one rack where the placement requires it."""
    p, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    if meta[TOPOLOGY] != REQUIRED or (count == 1 and rest < 0):
        return promise(
            nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, running, progress, meta, classes, c,
            promised, held, moments,
        )  # fmt: skip
    refresh_soonest(nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, meta, p)
    if rest >= 0:
        refresh_soonest(nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, meta, rest)
    ends = np.empty(progress[RUNNING])
    for i in range(progress[RUNNING]):
        ends[i] = jobs[running[i].job].ends
    ends.sort()
    shadow, rack, total = np.inf, 0, np.int64(-1)
    for again in range(2):  # the second time for the rack that was found
        begin = np.int64(0)
        for r in range(meta[RACKS]):
            end = np.int64(nodes[r].rack_end)
            if not again or r == rack:
                if classes[c].shared and count > 1:
                    total, moment = together(
                        nodes, pieces, soon, first, places, on, jobs, meta, ends, p, count, promised, held, begin, end
                    )
                else:
                    total, moment = one_each(nodes, soon, p, count, rest, promised, held, begin, end)
                if moment < shadow:
                    shadow, rack = moment, r
                if again:
                    return total, min(moment, ends[-1])
            begin = end
    return total, shadow


@allocating
def by_moment(nodes, soon, p, begin, end):
    """The nodes of a rack in the order in which they will fit a piece of kind p."""
    members = np.empty(end - begin, np.int64)
    moments = np.empty(end - begin)
    for k in range(begin, end):
        members[k - begin] = nodes[k].member
        moments[k - begin] = -soon[p, nodes[k].member]
    return members[np.argsort(moments, kind="mergesort")]


@allocating
def one_each(nodes, soon, p, count, rest, promised, held, begin, end):
    """A node for each piece: how many, and the moment at which all of them are able; inf never."""
    order = by_moment(nodes, soon, p, begin, end)
    total, shadow = np.int64(count), -np.inf
    if count > len(order) or soon[p, order[count - 1]] == NEVER:
        return total, np.inf
    for i in range(count):
        promised[i], held[i] = order[i], 1
        shadow = max(shadow, -soon[p, order[i]])
    if rest < 0:
        return total, shadow
    chosen, top = np.int64(-1), NEVER
    for k in range(begin, end):
        n, taken = np.int64(nodes[k].member), False
        for i in range(count):
            taken |= promised[i] == n
        if not taken and soon[rest, n] > top:
            chosen, top = n, soon[rest, n]
    promised[total], held[total] = chosen, 1
    return total + 1, max(shadow, -top)


@compiled
def able_by(nodes, pieces, first, places, on, jobs, meta, p, count, begin, end, when):
    able = 0
    for k in range(begin, end):
        able += capacity_at(nodes, pieces, first, places, on, jobs, meta, nodes[k].member, p, when, count)
    return able >= count


@allocating
def together(nodes, pieces, soon, first, places, on, jobs, meta, ends, p, count, promised, held, begin, end):
    """The same for pieces that may lie on one node."""
    low, high = -1, len(ends) - 1
    ever = able_by(nodes, pieces, first, places, on, jobs, meta, p, count, begin, end, ends[high])
    while ever and high - low > 1:
        middle = (low + high) // 2
        if able_by(nodes, pieces, first, places, on, jobs, meta, p, count, begin, end, ends[middle]):
            high = middle
        else:
            low = middle
    total, left = np.int64(0), count
    for n in by_moment(nodes, soon, p, begin, end):
        able = min(left, capacity_at(nodes, pieces, first, places, on, jobs, meta, n, p, ends[high], left))
        if able > 0:
            promised[total], held[total] = n, able
            total += 1
            left -= able
    return total, ends[high] if ever else np.inf
