"""A node and a piece as the compiled engine sees them: whether one takes the other, which GPUs, and what is free afterwards.

Runs that need it (shares of GPUs, or a placement that looks at single ones) are *detailed*: they keep what is free of each
GPU, and how many pieces of each size a node holds. Others count free GPUs and no more.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled, dispatcher
from weft.cluster.model import MOST_SHARED, WHOLE
from weft.cluster.placement import TIGHTEST
from weft.cluster.placements import PLACEMENTS

# A node: what it has (-1: not known), what is free of it, a bit for each group of nodes that it is in; of a detailed run
# also the thousandths that are free of each GPU, and its pieces by size (shares, then 1, 2, 4, 8 and any other number of
# GPUs), and a `note` for a placement to keep what it works out from these, NaN after every change. A
# `held` node is promised to the head of the queue (engine/backfill.py), and `spare_…` is what jobs that are `outlasting` the
# promise may take of it. Nodes are numbered anew in the order of racks and, in them, of domains: the k-th is `member` of row k.
# `rack_end` and `rack_free` of row r are not of a node but of rack r: where it ends in that order, and the thousandths of GPUs
# that are free there; `domain_end` and `domain_free` likewise. They are kept for a placement that looks at topology.
# A piece: what it asks; `types` has a bit for each accelerator type that it accepts; `size` is its place in a node's `mix`,
# `level` that of its GPUs among all numbers that are asked (engine/holes.py); so many nodes are `fitting`, as far as was
# counted, when `read` entries of the log had been read (-1: never yet); `counted` ones are only ever counted, not placed;
# `apart`: of a job with several pods of several shares each.
NODE = np.dtype(
    [
        *(
            (name, "i4") for name in ("gpus", "gpu_type", "free_gpus", "held")
        ),  # the first cache line is all that most ask
        *((name, "i8") for name in ("cpu", "free_cpu", "memory", "free_memory")),
        ("gpu_memory", "f8"),
        ("groups", "i8"),
        ("note", "f8"),
        ("milli", "i2", (MOST_SHARED,)),
        ("mix", "i2", (12,)),
        *((name, "i8") for name in ("spare_gpus", "spare_cpu", "spare_memory")),
        *((name, "i4") for name in ("rack", "domain", "member", "rack_end", "domain_end", "unused")),
        *((name, "i8") for name in ("rack_free", "domain_free")),  # to whole cache lines
    ]
)
PIECE = np.dtype(
    [
        *((name, "i8") for name in ("gpus", "milli", "types", "cpu", "memory", "size", "level", "fitting", "read")),
        ("gpu_memory", "f8"),
        ("counted", "?"),
        ("outlasting", "?"),
        ("apart", "?"),
    ]
)

# `meta`: the log's length, the placement's code, the rule for ties, the random generator's state, whether the run is
# detailed, how a share chooses its GPU, what racks are to the placement, and how many there are; how many shelves there are
# (engine/shelves.py; 0: none), the fewest free GPUs of a node on one, and how much of the log has been read for them.
WRITTEN, PLACEMENT, TIES, RANDOM_STATE, DETAILED, GPU_RULE, TOPOLOGY, RACKS, SHELVES, FEWEST, READ, META = range(12)
LOWEST, HIGHEST, RANDOM = range(3)
BY_TIGHTNESS, BY_CHANCE, BY_SCORE = range(3)

score, gpu_by_score = dispatcher([(p.score, p.gpu not in (TIGHTEST, "random")) for p in PLACEMENTS.values()])


@compiled
def below(meta, n):
    """A random whole number under n (xorshift64*, Vigna 2016)."""
    x = np.uint64(meta[RANDOM_STATE])
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    meta[RANDOM_STATE] = np.int64(x)
    return np.int64(((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % np.uint64(n))


@compiled
def times(node, piece, most, gpus, cpu, memory):
    """How many such pieces, up to ``most``, so many GPUs, cores and so much memory of a node hold."""
    if piece.gpus > 0:
        most = min(most, gpus // piece.gpus)
    if node.cpu >= 0 and piece.cpu > 0:
        most = min(most, cpu // piece.cpu)
    if node.memory >= 0 and piece.memory > 0:
        most = min(most, memory // piece.memory)
    return most


@compiled
def fits(node, piece):
    if piece.milli == WHOLE:
        if node.free_gpus < piece.gpus:
            return False
    else:
        able = 0
        for g in range(node.gpus):
            able += node.milli[g] >= piece.milli
        if able < piece.gpus:
            return False
    if not (piece.types >> node.gpu_type) & 1:
        return False
    if piece.outlasting and node.held:
        if node.spare_gpus < piece.gpus or (node.cpu >= 0 and node.spare_cpu < piece.cpu):
            return False
        if node.memory >= 0 and node.spare_memory < piece.memory:
            return False
    if piece.gpu_memory > 0 and 0 <= node.gpu_memory < piece.gpu_memory:
        return False
    if node.cpu >= 0 and node.free_cpu < piece.cpu:
        return False
    return node.memory < 0 or node.free_memory >= piece.memory


@compiled
def fits_on(node, piece, gpus):
    """Whether those GPUs of a node, a bit for each, have room for a piece."""
    able = True
    for g in range(node.gpus):
        able &= not (gpus >> g) & 1 or node.milli[g] >= piece.milli
    return able


@compiled
def pick(node, piece, context, meta):
    """The GPUs that a piece takes of a node that fits it, a bit for each: whole ones from the lowest number; a share by the
    placement's rule; shares of pods with several take those with the most room, so that as many pods fit as can."""
    taken = 0
    for _ in range(piece.gpus):
        found = -1
        if piece.milli < WHOLE and meta[GPU_RULE] == BY_SCORE and piece.gpus == 1:
            found = gpu_by_score(meta[PLACEMENT], piece, node, context)
        else:
            able = 0
            for g in range(node.gpus):
                if (taken >> g) & 1 or node.milli[g] < piece.milli:
                    continue
                able += 1
                if piece.apart:
                    if found < 0 or node.milli[g] > node.milli[found]:
                        found = g
                elif piece.milli < WHOLE and meta[GPU_RULE] == BY_CHANCE:
                    if below(meta, able) == 0:
                        found = g
                elif found < 0 or node.milli[g] < node.milli[found]:
                    found = g
        taken |= 1 << found
    return taken


@compiled
def take(nodes, pieces, log, meta, room, n, p, gpus, sign):
    """Allocates a piece of kind p on node n (sign 1) or gives it back (-1). ``room``: thousandths of GPUs that are free in
    each group of nodes; ``gpus``: a bit for each GPU, of a detailed run."""
    if meta[DETAILED]:
        for g in range(nodes[n].gpus):
            if (gpus >> g) & 1:
                before = nodes[n].milli[g]
                after = before - sign * pieces[p].milli
                nodes[n].milli[g] = after
                nodes[n].free_gpus += int(after == WHOLE) - int(before == WHOLE)
        nodes[n].mix[pieces[p].size] += sign
        nodes[n].note = np.nan
    else:
        nodes[n].free_gpus -= sign * pieces[p].gpus
    for group in range(len(room)):
        if (nodes[n].groups >> group) & 1:
            room[group] -= sign * pieces[p].gpus * pieces[p].milli
    if meta[TOPOLOGY]:
        nodes[nodes[n].rack].rack_free -= sign * pieces[p].gpus * pieces[p].milli
        nodes[nodes[n].domain].domain_free -= sign * pieces[p].gpus * pieces[p].milli
    if pieces[p].outlasting and nodes[n].held:
        nodes[n].spare_gpus -= sign * pieces[p].gpus
        nodes[n].spare_cpu -= sign * pieces[p].cpu
        nodes[n].spare_memory -= sign * pieces[p].memory
    nodes[n].free_cpu -= sign * pieces[p].cpu
    nodes[n].free_memory -= sign * pieces[p].memory
    log[meta[WRITTEN] & (len(log) - 1)] = n
    meta[WRITTEN] += 1
