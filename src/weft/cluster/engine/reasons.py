"""What waiting jobs wait for: found out once for a class of them, and added up for each of them."""

from __future__ import annotations

from weft.cluster.engine.allocate import enough, place
from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.index import able
from weft.cluster.engine.node import DETAILED, RANDOM_STATE, TOPOLOGY, WRITTEN, take
from weft.cluster.engine.topology import takes_in
from weft.cluster.placement import REQUIRED

PRIORITY, QUOTA, CAPACITY, TYPE, MEMORY, GANG, RACK, HOST, FRAGMENTATION = range(9)


@compiled
def why(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot):
    """What a class of waiting jobs waits for: the first thing that one of them alone would lack now. ``where[slot:]`` is a
    waiting job's: what is tried there is forgotten."""
    gang = classes[c].count > 1 or classes[c].rest >= 0
    in_one_rack = gang and meta[TOPOLOGY] == REQUIRED
    if not classes[c].blocked and not in_one_rack and (classes[c].count == 1 or not classes[c].shared):
        if enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
            return PRIORITY
        classes[c].blocked = True
    elif not classes[c].blocked:
        random = meta[RANDOM_STATE]
        if place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot):
            for i in range(classes[c].count + (classes[c].rest >= 0)):
                p = classes[c].piece if i < classes[c].count else classes[c].rest
                gpus = on[slot + i] if meta[DETAILED] else 0
                take(nodes, pieces, log, meta, room, where[slot + i], p, gpus, -1)
            meta[RANDOM_STATE] = random
            return PRIORITY
        classes[c].blocked = True
    reason = lacking(pieces, meta, room, classes, c)
    if reason >= 0:
        return reason
    if in_one_rack and enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
        if not classes[c].shared:
            return RACK
        count, piece = classes[c].count, classes[c].piece
        return RACK if takes_in(nodes, pieces, meta, 0, len(nodes), piece, count) == count else GANG
    if gang:
        return GANG
    fits_bare = able(nodes, pieces, best, ways, levels, log, meta, context, classes[c].bare, 1)
    return HOST if fits_bare else FRAGMENTATION


@compiled
def lacking(pieces, meta, room, classes, c):
    """What a blocked class waits for, so far as that is known without a look at the nodes; -1: not known."""
    if room[0] < classes[c].milli:
        return CAPACITY
    if room[classes[c].of_type] < classes[c].milli:
        return TYPE
    if room[classes[c].of_memory] < classes[c].milli:
        return MEMORY
    if classes[c].count > 1 or classes[c].rest >= 0:
        return -1 if meta[TOPOLOGY] == REQUIRED else GANG
    if classes[c].bare == classes[c].piece:
        return FRAGMENTATION
    if pieces[classes[c].bare].read == meta[WRITTEN]:
        return HOST if pieces[classes[c].bare].fitting else FRAGMENTATION
    return -1


@compiled
def settle(classes, total, c, now):
    """Adds up what a class has waited for since it was last settled."""
    if classes[c].reason >= 0:
        total[c, classes[c].reason] += now - classes[c].since
    classes[c].since = now


@compiled
def begin_waiting(classes, total, waits, c, job, now):
    """A job waits from now on for what its class waits for: ``waits`` is the difference of its class's totals."""
    settle(classes, total, c, now)
    for reason in range(total.shape[1]):
        waits[job, reason] -= total[c, reason]


@compiled
def end_waiting(classes, total, waits, c, job, now):
    settle(classes, total, c, now)
    for reason in range(total.shape[1]):
        waits[job, reason] += total[c, reason]
