"""What waiting jobs wait for: determined once for a class of them, and added up for each of them."""

from weft.cluster.engine.allocate import enough, kind_of, pieces_of, place
from weft.cluster.engine.compiled import compiled, inlined
from weft.cluster.engine.index import able
from weft.cluster.engine.node import DETAILED, RANDOM_STATE, TOPOLOGY, WRITTEN, take
from weft.cluster.engine.topology import takes_in
from weft.cluster.placement import REQUIRED

PRIORITY, QUOTA, CAPACITY, TYPE, MEMORY, GANG, RACK, HOST, FRAGMENTATION = range(9)


@compiled
def why(s, c, slot):
    """What a class of waiting jobs waits for: the first thing that one of them alone would lack now. ``where[slot:]``
    is a waiting job's: what is tried there is forgotten."""
    classes = s.classes
    gang = classes[c].count > 1 or classes[c].rest >= 0
    in_one_rack = gang and s.meta[TOPOLOGY] == REQUIRED
    if not classes[c].blocked and not in_one_rack and (classes[c].count == 1 or not classes[c].shared):
        if enough(s, c):
            return PRIORITY
        classes[c].blocked = True
    elif not classes[c].blocked:
        random = s.meta[RANDOM_STATE]
        if place(s, c, slot):
            for i in range(pieces_of(classes, c)):
                gpus = s.on[slot + i] if s.meta[DETAILED] else 0
                take(s, s.where[slot + i], kind_of(classes, c, i), gpus, -1)
            s.meta[RANDOM_STATE] = random
            return PRIORITY
        classes[c].blocked = True
    reason = known_reason(s, c)
    if reason >= 0:
        return reason
    if in_one_rack and enough(s, c):
        if not classes[c].shared:
            return RACK
        count, piece = classes[c].count, classes[c].piece
        return RACK if takes_in(s, 0, len(s.nodes), piece, count) == count else GANG
    if gang:
        return GANG
    return HOST if able(s, classes[c].bare, 1) else FRAGMENTATION


@compiled
def known_reason(s, c):
    """What a blocked class waits for, as far as that is known without a look at the nodes; -1: unknown."""
    classes = s.classes
    if s.free[0] < classes[c].milli:
        return CAPACITY
    if s.free[classes[c].of_type] < classes[c].milli:
        return TYPE
    if s.free[classes[c].of_memory] < classes[c].milli:
        return MEMORY
    if classes[c].count > 1 or classes[c].rest >= 0:
        return -1 if s.meta[TOPOLOGY] == REQUIRED else GANG
    if classes[c].bare == classes[c].piece:
        return FRAGMENTATION
    if s.pieces[classes[c].bare].read == s.meta[WRITTEN]:
        return HOST if s.pieces[classes[c].bare].fitting else FRAGMENTATION
    return -1


@inlined
def set_reason(classes, total, c, reason, now):
    if reason != classes[c].reason:
        add_up(classes, total, c, now)
        classes[c].reason = reason


@inlined
def add_up(classes, total, c, now):
    """Adds up what a class has waited for since this was last done."""
    if classes[c].reason >= 0:
        total[c, classes[c].reason] += now - classes[c].since
    classes[c].since = now


@inlined
def begin_waiting(classes, total, waits, c, job, now):
    """A job waits from now on for what its class waits for: ``waits`` is the difference of its class's totals."""
    add_up(classes, total, c, now)
    for reason in range(total.shape[1]):
        waits[job, reason] -= total[c, reason]


@inlined
def end_waiting(classes, total, waits, c, job, now):
    add_up(classes, total, c, now)
    for reason in range(total.shape[1]):
        waits[job, reason] += total[c, reason]
