"""Where a piece of a job goes, and how many nodes take one.

A *piece* is what one node must give: GPUs of some type and memory, cores, main memory. Jobs of a trace share few kinds of
pieces. Where the placement allows it all kinds share one index (engine/shelves.py). Otherwise each kind has a tree with the
score of every node for it (-inf where it does not fit), so the best node is found from the root. A change of a node is
written to a log; whoever keeps an index reads the log from where it last stopped, when it is asked.

Compiled functions take arrays one by one: Numba counts references to every array that it takes out of a tuple.
"""

from __future__ import annotations

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import HIGHEST, LOWEST, PLACEMENT, RANDOM, SHELVES, TIES, WRITTEN, below, fits, score
from weft.cluster.engine.shelves import able_on_shelves, choose_on_shelves
from weft.cluster.engine.tree import FAN, NEVER, gather, update

# `best` [P, entries]: the nodes' scores, a tree for each kind (engine/tree.py), with `levels` and `ways`. `log`: a ring of node
# numbers. `context`: what the placement knows of the trace.


@compiled
def score_of(node, piece, placement, context):
    if not fits(node, piece):
        return NEVER
    return 0.0 if piece.counted else score(placement, piece, node, context)


@compiled
def build(nodes, pieces, best, ways, levels, meta, context, p):
    best[p, :] = NEVER
    ways[p, :] = 1
    fitting = 0
    for n in range(len(nodes)):
        best[p, n] = score_of(nodes[n], pieces[p], meta[PLACEMENT], context)
        fitting += best[p, n] != NEVER
    for level in range(len(levels) - 2):
        for group in range((levels[level + 1] - levels[level]) // FAN):
            gather(best, ways, levels, p, level, group, meta[TIES] == RANDOM)
    pieces[p].fitting = fitting


@compiled
def refresh(nodes, pieces, best, ways, levels, log, meta, context, p):
    """Brings the tree of kind p up to date."""
    written, read = meta[WRITTEN], pieces[p].read
    pieces[p].read = written
    if read < 0 or written - read > len(log):
        build(nodes, pieces, best, ways, levels, meta, context, p)
        return
    placement, random_ties, ring = meta[PLACEMENT], meta[TIES] == RANDOM, len(log) - 1
    for entry in range(read, written):
        n = log[entry & ring]
        value = score_of(nodes[n], pieces[p], placement, context)
        if best[p, n] != value:
            pieces[p].fitting += int(value != NEVER) - int(best[p, n] != NEVER)
            update(best, ways, levels, p, n, value, random_ties)


@compiled
def choose(nodes, pieces, best, ways, levels, log, meta, context, p):
    """The node with the highest score for a piece of kind p, ties by the rule; -1 where it fits nowhere."""
    if meta[SHELVES]:
        return choose_on_shelves(nodes, pieces, best, ways, levels, log, meta, p)
    refresh(nodes, pieces, best, ways, levels, log, meta, context, p)
    k = levels[len(levels) - 2]
    top = best[p, k]
    if top == NEVER:
        return -1
    rule = meta[TIES]
    rest = below(meta, ways[p, k]) if rule == RANDOM else 0
    for level in range(len(levels) - 3, -1, -1):
        k = levels[level] + (k - levels[level + 1]) * FAN
        if rule == HIGHEST:
            k += FAN - 1
            while best[p, k] != top:
                k -= 1
        elif rule == LOWEST:
            while best[p, k] != top:
                k += 1
        else:
            while best[p, k] != top or rest >= ways[p, k]:
                if best[p, k] == top:
                    rest -= ways[p, k]
                k += 1
    return k


@compiled
def able(nodes, pieces, best, ways, levels, log, meta, context, p, least):
    """Whether at least so many nodes take a piece of kind p each."""
    if meta[SHELVES]:
        return able_on_shelves(nodes, pieces, best, ways, levels, log, meta, p, least)
    refresh(nodes, pieces, best, ways, levels, log, meta, context, p)
    return pieces[p].fitting >= least
