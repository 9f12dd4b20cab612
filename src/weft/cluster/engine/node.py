"""A node and a piece as the compiled engine has them: whether one takes the other, which GPUs, and what is free
afterwards.

*Detailed* runs (shares of GPUs, or a placement that looks at single ones) track what is free of each GPU, and how many
pieces of each size a node holds. Other runs only count free GPUs.
"""

from typing import Any, NamedTuple

import numpy as np

from weft.cluster.engine.compiled import compiled, dispatcher, inlined
from weft.cluster.model import MOST_SHARED, WHOLE
from weft.cluster.placement import TIGHTEST
from weft.cluster.placements import PLACEMENTS

# A node: its capacity (-1: unknown), what is free of it, and a bit for each group of nodes that it is in; in a detailed
# run also the free thousandths of each GPU, its pieces by size (shares, then 1, 2, 4, 8 and any other number of GPUs),
# and a `note` where a placement keeps what it computed from these, NaN after every change. A `reserved` node is part of
# the head's reservation (easy_loop.py), and `spare_…` is what jobs that run beyond the shadow time may take of it. In
# order of racks, and in them of domains, the k-th node is `member` of row k. `rack_end` and `rack_free` of row r are
# not of a node but of rack r: where it ends in that order, and the free thousandths of its GPUs; `domain_end` and
# `domain_free` likewise.
NODE = np.dtype(
    [
        *((name, "i4") for name in ("gpus", "gpu_type", "free_gpus", "reserved")),  # the first cache line
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
# A kind of piece: what it requests; `types` has a bit for each accelerator type that it accepts; `size` is its position
# in a node's `mix`, `gpus_index` that of its GPUs among all numbers that are requested (conservative_plan.py).
# `fitting` nodes take it, as far as was counted when `read` entries of the log had been read (-1: never). `counted`
# kinds are never placed, only counted. `beyond_shadow`: of jobs that run beyond the shadow time. `spread`: of a job
# with several pods of several shares each.
PIECE = np.dtype(
    [
        *(
            (name, "i8")
            for name in ("gpus", "milli", "types", "cpu", "memory", "size", "gpus_index", "fitting", "read")
        ),
        ("gpu_memory", "f8"),
        ("counted", "?"),
        ("beyond_shadow", "?"),
        ("spread", "?"),
    ]
)

# `meta`: the log's length, the placement's code, the rule for ties, the random generator's state, whether the run is
# detailed, how a share chooses its GPU, what racks are to the placement, and how many there are; how many buckets there
# are (index.py; 0: none), the fewest free GPUs of a node in one, and how much of the log has been read for them.
WRITTEN, PLACEMENT, TIES, RANDOM_STATE, DETAILED, GPU_RULE, TOPOLOGY, RACKS, BUCKETS, FEWEST, READ, GPU_CODE, META = (
    range(13)
)
LOWEST, HIGHEST, RANDOM = range(3)
BY_TIGHTNESS, BY_CHANCE, BY_SCORE = range(3)

score, gpu_by_score = dispatcher([(p.score, p.gpu not in (TIGHTEST, "random")) for p in PLACEMENTS.values()])


class State(NamedTuple):
    """The cluster, what is placed on it, and the index over its nodes; arrays that every compiled function may
    change."""

    nodes: Any  # [N] NODE
    pieces: Any  # [P] PIECE
    classes: Any  # [C] classes.CLASS
    best: Any  # the index (index.py), with `ways` and `levels`
    ways: Any
    levels: Any
    log: Any  # a ring of the numbers of nodes that changed
    meta: Any  # [META]
    context: Any  # what the placement knows of the trace
    free: Any  # free thousandths of GPUs in each group of nodes
    where: Any  # the node of each piece, from a job's `slot`
    on: Any  # in a detailed run the GPUs of that node that it takes, a bit for each


@compiled
def below(meta, n):
    """A random whole number under n (xorshift64*, Vigna 2016)."""
    x = np.uint64(meta[RANDOM_STATE])
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    meta[RANDOM_STATE] = np.int64(x)
    return np.int64(((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % np.uint64(n))


@inlined
def times(node, piece, most, gpus, cpu, memory):
    """How many such pieces, up to ``most``, fit into so many GPUs, cores and so much memory of a node."""
    if piece.gpus > 0:
        most = min(most, gpus // piece.gpus)
    if node.cpu >= 0 and piece.cpu > 0:
        most = min(most, cpu // piece.cpu)
    if node.memory >= 0 and piece.memory > 0:
        most = min(most, memory // piece.memory)
    return most


@inlined
def accepts(node, piece):
    """Whether a node is of a type, and its GPUs of a memory, that the piece accepts."""
    return (piece.types >> node.gpu_type) & 1 != 0 and not 0 <= node.gpu_memory < piece.gpu_memory


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
    if piece.beyond_shadow and node.reserved:
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
    """Whether those GPUs of a node, a bit for each, have enough free for a piece."""
    able = True
    for g in range(node.gpus):
        able &= not (gpus >> g) & 1 or node.milli[g] >= piece.milli
    return able


@compiled
def pick(s, n, p):
    """The GPUs that a piece of kind p takes of node n, which it fits, a bit for each: whole ones from the lowest
    number; a share by the placement's rule; shares of pods with several take those with the most free, so that as many
    pods fit as can."""
    node, piece, meta = s.nodes[n], s.pieces[p], s.meta
    taken = 0
    for _ in range(piece.gpus):
        chosen = -1
        if piece.milli < WHOLE and meta[GPU_RULE] == BY_SCORE and piece.gpus == 1:
            chosen = gpu_by_score(meta[GPU_CODE], piece, node, s.context)
        else:
            able = 0
            for g in range(node.gpus):
                if (taken >> g) & 1 or node.milli[g] < piece.milli:
                    continue
                able += 1
                if piece.spread:
                    if chosen < 0 or node.milli[g] > node.milli[chosen]:
                        chosen = g
                elif piece.milli < WHOLE and meta[GPU_RULE] == BY_CHANCE:
                    if below(meta, able) == 0:
                        chosen = g
                elif chosen < 0 or node.milli[g] < node.milli[chosen]:
                    chosen = g
        taken |= 1 << chosen
    return taken


@inlined
def log_change(s, n):
    s.log[s.meta[WRITTEN] & (len(s.log) - 1)] = n
    s.meta[WRITTEN] += 1


@inlined
def take(s, n, p, gpus, sign):
    """Allocates a piece of kind p on node n (sign 1) or gives it back (-1). ``gpus``: a bit for each GPU, of a detailed
    run."""
    nodes, pieces = s.nodes, s.pieces
    if s.meta[DETAILED]:
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
    for group in range(len(s.free)):
        if (nodes[n].groups >> group) & 1:
            s.free[group] -= sign * pieces[p].gpus * pieces[p].milli
    if s.meta[TOPOLOGY]:
        nodes[nodes[n].rack].rack_free -= sign * pieces[p].gpus * pieces[p].milli
        nodes[nodes[n].domain].domain_free -= sign * pieces[p].gpus * pieces[p].milli
    if pieces[p].beyond_shadow and nodes[n].reserved:
        nodes[n].spare_gpus -= sign * pieces[p].gpus
        nodes[n].spare_cpu -= sign * pieces[p].cpu
        nodes[n].spare_memory -= sign * pieces[p].memory
    nodes[n].free_cpu -= sign * pieces[p].cpu
    nodes[n].free_memory -= sign * pieces[p].memory
    log_change(s, n)
