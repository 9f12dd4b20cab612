"""A job's nodes: all of its pieces find one, or none is placed; and those who wait for what it gives back."""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.index import able, choose
from weft.cluster.engine.node import DETAILED, RANDOM_STATE, TOPOLOGY, WRITTEN, fits, pick, take
from weft.cluster.engine.topology import choose_among, fullest_of_best, nearest, takes_freed
from weft.cluster.placement import REQUIRED


@compiled
def enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
    """Whether every piece of a job of class c finds a node, as far as counting tells: exact unless pieces may share a node."""
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    least = 1 if classes[c].shared else count
    if not able(nodes, pieces, best, ways, levels, log, meta, context, piece, least):
        return False
    # Whole nodes take the remainder too.
    return rest < 0 or able(nodes, pieces, best, ways, levels, log, meta, context, rest, count + 1)


@compiled
def place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot):
    """Allocates all pieces of a job of class c, or none; their nodes go to ``where[slot:]``, and the GPUs that
    they take of them, a bit for each, to ``on[slot:]`` in a detailed run."""
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    asks = count > 1 or rest >= 0 or meta[TOPOLOGY]  # else `choose` says as much
    if asks and not enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
        return False
    placed, random = 0, meta[RANDOM_STATE]
    # For a placement that looks at racks: among which nodes the pieces before `until` go.
    begin, end, until = np.int64(0), np.int64(0), 0
    for i in range(count + (rest >= 0)):
        p = piece if i < count else rest
        if meta[TOPOLOGY]:
            if i == until:
                if count == 1 and rest < 0:
                    begin, end, taken = fullest_of_best(nodes, best, levels, meta, piece)
                else:
                    begin, end, taken = nearest(nodes, pieces, meta, piece, max(count - i, 0), rest)
                until += taken
            n = choose_among(nodes, pieces, meta, context, p, begin, end)
        else:
            n = choose(nodes, pieces, best, ways, levels, log, meta, context, p)
        if n < 0:
            break
        gpus = 0
        if meta[DETAILED]:
            gpus = pick(nodes[n], pieces[p], context, meta)
            on[slot + i] = gpus
        take(nodes, pieces, log, meta, room, n, p, gpus, 1)
        where[slot + i] = n
        placed += 1
    if placed == count + (rest >= 0):
        return True
    for i in range(placed):
        gpus = on[slot + i] if meta[DETAILED] else 0
        take(nodes, pieces, log, meta, room, where[slot + i], piece, gpus, -1)
    meta[RANDOM_STATE] = random  # an attempt that fails leaves nothing behind
    return False


@compiled
def give_back(nodes, pieces, log, meta, room, classes, c, where, on, slot):
    """Frees a job's pieces, and wakes the classes that could use them."""
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    last = slot + count + (rest >= 0)
    for i in range(slot, last):
        gpus = on[i] if meta[DETAILED] else 0
        take(nodes, pieces, log, meta, room, where[i], piece if i < slot + count else rest, gpus, -1)
    most = 0
    for i in range(slot, last):
        most = max(most, nodes[where[i]].free_gpus)
    for other in range(len(classes)):
        if classes[other].blocked and classes[other].least <= most:
            classes[other].blocked = not helps(nodes, pieces, meta, classes, other, where, slot, last)


@compiled
def helps(nodes, pieces, meta, classes, c, where, begin, end):
    """Whether what was freed on the nodes ``where[begin:end]`` may let a blocked class fit."""
    piece, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    if meta[TOPOLOGY] == REQUIRED and (count > 1 or rest >= 0):
        return takes_freed(nodes, pieces, meta, piece, count, rest, where, begin, end)
    for i in range(begin, end):
        if fits(nodes[where[i]], pieces[piece]) or (rest >= 0 and fits(nodes[where[i]], pieces[rest])):
            return True
    return False


@compiled
def block(nodes, pieces, best, ways, levels, log, meta, context, classes, ready, count):
    """Of the ``ready`` classes all that do not fit any more."""
    for i in range(count):
        c = ready[i]
        bare = classes[c].bare
        if pieces[bare].read == meta[WRITTEN]:  # known: no call, which is slower than everything else here
            fits_bare = pieces[bare].fitting > 0
        else:
            fits_bare = able(nodes, pieces, best, ways, levels, log, meta, context, bare, 1)
        if not fits_bare or not enough(nodes, pieces, best, ways, levels, log, meta, context, classes, c):
            classes[c].blocked = True
