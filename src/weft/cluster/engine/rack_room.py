"""Room for a gang that racks matter to, in place of jobs that stand after it (``weft.cluster.preempt.least_harm`` is the plain
form of it).

A domain or a rack is tried only if it may turn out better than those before: if enough of its nodes would yield less important
jobs than those had to.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.allocate import place
from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import DETAILED, TOPOLOGY
from weft.cluster.engine.room import make_room
from weft.cluster.engine.standing import standing_at, wanted
from weft.cluster.engine.tree import NEVER
from weft.cluster.engine.yields import refresh_yields
from weft.cluster.placement import REQUIRED

DOMAIN, RACK, ANYWHERE = range(3)


@compiled
def make_room_near(
    nodes, pieces, best, ways, levels, log, meta, context, room, classes, tree, read, asked, first, places, sorted_at, where,
    on, jobs, rules, stopped, j, now,
):  # fmt: skip
    """As :func:`make_room`, for a placement that looks at topology."""
    c, slot, limit = jobs[j].cls, jobs[j].slot, wanted(jobs, j, rules, now)
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    if place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot):
        for i in range(slot, slot + count + (rest >= 0) if meta[DETAILED] else slot):
            places[i].gpus = on[i]
        return 0
    begin, end, least = np.int64(0), np.int64(0), NEVER
    if count > 1 or rest >= 0:
        for kind in range(ANYWHERE if meta[TOPOLOGY] == REQUIRED else ANYWHERE + 1):
            at = np.int64(0)
            while at < len(nodes):
                until = end_of(nodes, at, kind)
                for p in (piece, rest):
                    if p >= 0:
                        refresh_yields(
                            nodes, pieces, tree, read, asked, ways, levels, log, first, places, sorted_at, jobs, rules,
                            meta, p, now,
                        )  # fmt: skip
                if may_take(nodes, classes, tree, c, at, until, limit, least):
                    victim = make_room(
                        nodes, pieces, best, ways, levels, log, meta, context, room, classes, tree, read, asked, first, places,
                        sorted_at, where, jobs, rules, stopped, j, at, until, True, now,
                    )  # fmt: skip
                    if victim >= 0:
                        standing = standing_at(jobs, victim, rules, now) if victim < len(jobs) else np.inf
                        if standing > least:
                            begin, end, least = at, until, standing
                at = until
        if end == 0:
            return -1
    return make_room(
        nodes, pieces, best, ways, levels, log, meta, context, room, classes, tree, read, asked, first, places, sorted_at,
        where, jobs, rules, stopped, j, begin, end, False, now,
    )  # fmt: skip


@compiled
def end_of(nodes, at, kind):
    """Where the domain or the rack ends that begins at a place in the order of racks."""
    if kind == ANYWHERE:
        return np.int64(len(nodes))
    node = nodes[nodes[at].member]
    return np.int64(nodes[node.domain].domain_end if kind == DOMAIN else nodes[node.rack].rack_end)


@compiled
def may_take(nodes, classes, tree, c, begin, end, limit, least):
    """Whether so many of these nodes as a job of class c needs at least yield it room of jobs less important than ``least``."""
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    whole = other = 0
    for k in range(begin, end):
        n = nodes[k].member
        whole += tree[piece, n] >= limit and tree[piece, n] > least
        if rest >= 0:
            other += tree[rest, n] >= limit and tree[rest, n] > least
    return whole >= (1 if classes[c].shared else count) and (rest < 0 or other > count)
