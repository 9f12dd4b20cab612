"""What a node has free at every moment, by the plan of what stays there.

Each node has its stays, running or planned, in two lists: in the order in which they begin and in that in which they end. One
walk along both meets every moment at which something changes there.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import times

# A stay of a piece on a node: when it begins and when it is expected to end, and its neighbours on that node in either order
# (-1: none). `first` [N, 2]: where the lists of a node begin.
BEGINS, ENDS = 0, 1
STAY = np.dtype([("moment", "f8", (2,)), ("next", "i4", (2,)), ("previous", "i4", (2,)), ("piece", "i8")])


@compiled
def enter(first, stays, n, slot, piece, begins, ends):
    """Enters a stay on node n."""
    stays[slot].piece = piece
    stays[slot].moment[BEGINS], stays[slot].moment[ENDS] = begins, ends
    for order in range(2):
        before, after = np.int64(-1), np.int64(first[n, order])
        while after >= 0 and stays[after].moment[order] <= stays[slot].moment[order]:
            before, after = after, np.int64(stays[after].next[order])
        stays[slot].previous[order], stays[slot].next[order] = before, after
        if before >= 0:
            stays[before].next[order] = slot
        else:
            first[n, order] = slot
        if after >= 0:
            stays[after].previous[order] = slot


@compiled
def leave(first, stays, n, slot):
    for order in range(2):
        before, after = stays[slot].previous[order], stays[slot].next[order]
        if before >= 0:
            stays[before].next[order] = after
        else:
            first[n, order] = after
        if after >= 0:
            stays[after].previous[order] = before


@compiled
def begin_walk(nodes, first, stays, n, now):
    """Where both lists begin, and what node n has: who is past the estimate may stay for ever, and is passed over."""
    b, e = np.int64(first[n, BEGINS]), np.int64(first[n, ENDS])
    while e >= 0 and stays[e].moment[ENDS] <= now:
        e = np.int64(stays[e].next[ENDS])
    return b, e, np.int64(nodes[n].gpus), nodes[n].cpu, nodes[n].memory


@compiled
def walk(stays, pieces, b, e, moment, gpus, cpu, memory):
    """On to a moment: where that is in both lists, and what is free then."""
    while b >= 0 and stays[b].moment[BEGINS] <= moment:
        piece = stays[b].piece
        gpus -= pieces[piece].gpus
        cpu -= pieces[piece].cpu
        memory -= pieces[piece].memory
        b = np.int64(stays[b].next[BEGINS])
    while e >= 0 and stays[e].moment[ENDS] <= moment:
        piece = stays[e].piece
        gpus += pieces[piece].gpus
        cpu += pieces[piece].cpu
        memory += pieces[piece].memory
        e = np.int64(stays[e].next[ENDS])
    return b, e, gpus, cpu, memory


@compiled
def change_after(stays, b, e):
    """The next moment at which something begins or ends; inf never."""
    moment = np.inf
    if b >= 0:
        moment = stays[b].moment[BEGINS]
    if e >= 0:
        moment = min(moment, stays[e].moment[ENDS])
    return moment


@compiled
def least(nodes, pieces, first, stays, n, begin, end, now):
    """What is free of node n throughout two moments: GPUs, cores, memory."""
    b, e, gpus, cpu, memory = begin_walk(nodes, first, stays, n, now)
    b, e, gpus, cpu, memory = walk(stays, pieces, b, e, begin, gpus, cpu, memory)
    least_gpus, least_cpu, least_memory = gpus, cpu, memory
    while True:
        moment = change_after(stays, b, e)
        if moment >= end:
            return least_gpus, least_cpu, least_memory
        b, e, gpus, cpu, memory = walk(stays, pieces, b, e, moment, gpus, cpu, memory)
        least_gpus, least_cpu, least_memory = min(least_gpus, gpus), min(least_cpu, cpu), min(least_memory, memory)


@compiled
def suits(node, piece):
    """Whether a node is of a type, and its GPUs of a memory, that the piece accepts."""
    return (piece.types >> node.gpu_type) & 1 != 0 and not 0 <= node.gpu_memory < piece.gpu_memory


@compiled
def room_for(nodes, pieces, first, stays, n, p, begin, end, now):
    """How many pieces of kind p node n takes throughout two moments."""
    node, piece = nodes[n], pieces[p]
    if not suits(node, piece):
        return 0
    gpus, cpu, memory = least(nodes, pieces, first, stays, n, begin, end, now)
    return max(times(node, piece, np.int64(1 << 30), gpus, cpu, memory), 0)


@compiled
def soonest(nodes, pieces, first, stays, n, p, since, limit, length, now):
    """The earliest moment from ``since`` on, and before ``limit``, from which node n takes a piece of kind p for so long: the
    limit where there is none."""
    node, piece = nodes[n], pieces[p]
    if not suits(node, piece):
        return limit
    b, e, gpus, cpu, memory = begin_walk(nodes, first, stays, n, now)
    moment, opened = since, np.inf
    while True:
        b, e, gpus, cpu, memory = walk(stays, pieces, b, e, moment, gpus, cpu, memory)
        fits = gpus >= piece.gpus
        fits &= (node.cpu < 0 or cpu >= piece.cpu) and (node.memory < 0 or memory >= piece.memory)
        following = change_after(stays, b, e)
        if fits:
            opened = min(opened, moment)
            if opened + length <= following:
                return min(opened, limit)
        else:
            opened = np.inf
            if following >= limit:
                return limit
        moment = following
