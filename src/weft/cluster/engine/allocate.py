"""A job's nodes: all of its pieces are placed, or none; and the classes of jobs that may fit after some are given
back."""

import numpy as np

from weft.cluster.engine.compiled import compiled, entry, inlined
from weft.cluster.engine.index import able, choose
from weft.cluster.engine.node import DETAILED, RANDOM_STATE, TOPOLOGY, WRITTEN, fits, pick, take
from weft.cluster.engine.topology import choose_among, fullest_with_best_score, nearest, rack_takes_freed
from weft.cluster.placement import REQUIRED


@inlined
def pieces_of(classes, c):
    """How many pieces a job of class c has."""
    return classes[c].count + (classes[c].rest >= 0)


@inlined
def kind_of(classes, c, i):
    """The kind of the i-th piece of a job of class c."""
    return classes[c].piece if i < classes[c].count else classes[c].rest


@compiled
def enough(s, c):
    """Whether every piece of a job of class c finds a node, as far as counting says: exact unless pieces may share a
    node."""
    piece, count, rest = s.classes[c].piece, s.classes[c].count, s.classes[c].rest
    if not able(s, piece, 1 if s.classes[c].shared else count):
        return False
    return rest < 0 or able(s, rest, count + 1)  # whole nodes take the remainder too


@entry
def place(s, c, slot):
    """Allocates all pieces of a job of class c, or none; their nodes go to ``where[slot:]``, and in a detailed run the
    GPUs that they take of them, a bit for each, to ``on[slot:]``."""
    piece, count, rest, meta = s.classes[c].piece, s.classes[c].count, s.classes[c].rest, s.meta
    total = count + (rest >= 0)
    counts_first = total > 1 or meta[TOPOLOGY]  # else `choose` says as much
    if counts_first and not enough(s, c):
        return False
    placed, random = 0, meta[RANDOM_STATE]
    # For a placement that looks at racks: the candidates of the pieces before `until`.
    begin, end, until = np.int64(0), np.int64(0), 0
    for i in range(total):
        p = piece if i < count else rest
        if meta[TOPOLOGY]:
            if i == until:
                if total == 1:
                    begin, end, taken = fullest_with_best_score(s, piece)
                else:
                    begin, end, taken = nearest(s, piece, max(count - i, 0), rest)
                until += taken
            n = choose_among(s, p, begin, end)
        else:
            n = choose(s, p)
        if n < 0:
            break
        gpus = 0
        if meta[DETAILED]:
            gpus = pick(s, n, p)
            s.on[slot + i] = gpus
        take(s, n, p, gpus, 1)
        s.where[slot + i] = n
        placed += 1
    if placed == total:
        return True
    for i in range(placed):
        gpus = s.on[slot + i] if meta[DETAILED] else 0
        take(s, s.where[slot + i], piece, gpus, -1)
    meta[RANDOM_STATE] = random  # an attempt that fails leaves nothing behind
    return False


@entry
def give_back(s, c, slot):
    """Frees a job's pieces, and unblocks the classes that could use them."""
    last = slot + pieces_of(s.classes, c)
    for i in range(slot, last):
        gpus = s.on[i] if s.meta[DETAILED] else 0
        take(s, s.where[i], kind_of(s.classes, c, i - slot), gpus, -1)
    most = 0
    for i in range(slot, last):
        most = max(most, s.nodes[s.where[i]].free_gpus)
    for other in range(len(s.classes)):
        if s.classes[other].blocked and s.classes[other].least <= most:
            s.classes[other].blocked = not helps(s, other, slot, last)


@compiled
def helps(s, c, begin, end):
    """Whether what was freed on the nodes ``where[begin:end]`` may let a blocked class fit."""
    piece, count, rest = s.classes[c].piece, s.classes[c].count, s.classes[c].rest
    if s.meta[TOPOLOGY] == REQUIRED and (count > 1 or rest >= 0):
        return rack_takes_freed(s, piece, count, rest, begin, end)
    for i in range(begin, end):
        node = s.nodes[s.where[i]]
        if fits(node, s.pieces[piece]) or (rest >= 0 and fits(node, s.pieces[rest])):
            return True
    return False


@compiled
def block(s, ready, count):
    """Blocks those of the ``ready`` classes that do not fit any more."""
    for i in range(count):
        c = ready[i]
        bare = s.classes[c].bare
        if s.pieces[bare].read == s.meta[WRITTEN]:  # known: no call, which is slower than everything else here
            fits_bare = s.pieces[bare].fitting > 0
        else:
            fits_bare = able(s, bare, 1)
        if not fits_bare or not enough(s, c):
            s.classes[c].blocked = True
