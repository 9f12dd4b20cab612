"""Where a piece of a job goes: for each kind of piece a tree of maxima over the nodes, brought up to date when it is asked.

A *piece* is what one node must give: GPUs of some type and memory, cores, main memory. Jobs of a trace share few kinds of
pieces. The tree of a kind holds the score of every node for it (-inf where it does not fit), so the best node is found from
the root. A change of a node is written to a log; a kind reads the log from where it last stopped. So a change costs nothing
to kinds that nobody asks for, and a few cache lines to the others.

Compiled functions take arrays one by one: Numba counts references to every array that it takes out of a tuple.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import PLACEMENT, TIES, WRITTEN, below, fits, score

# `best` [P, entries]: the nodes' scores, padded to a multiple of FAN, then the largest of each FAN of them (two cache
# lines), padded, and so on up to one. `levels`: where each level begins, and where the last one ends. `ways`: how many nodes
# share an entry's score, for random ties. `log`: a ring of node numbers. `context`: what the placement knows of the trace.
FAN = 16
LOWEST, HIGHEST, RANDOM = 0, 1, 2
NEVER = -np.inf


@compiled
def score_of(node, piece, placement, context):
    if not fits(node, piece):
        return NEVER
    return 0.0 if piece.counted else score(placement, piece, node, context)


@compiled
def gather(best, ways, levels, p, level, group, random_ties):
    """The larger of a group's members, written to the level above; says whether that changed anything."""
    first = levels[level] + group * FAN
    up = levels[level + 1] + group
    top = best[p, first]
    for k in range(first + 1, first + FAN):
        top = max(top, best[p, k])
    changed = best[p, up] != top
    best[p, up] = top
    if random_ties:
        count = 0
        for k in range(first, first + FAN):
            if best[p, k] == top:
                count += ways[p, k]
        changed |= ways[p, up] != count
        ways[p, up] = count
    return changed


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
def update(best, ways, levels, p, n, value, random_ties):
    """Sets leaf n, and what depends on it."""
    k, old = n, best[p, n]
    best[p, n] = value
    for level in range(len(levels) - 2):
        group = (k - levels[level]) // FAN
        up = levels[level + 1] + group
        if random_ties:
            if not gather(best, ways, levels, p, level, group, True):
                return
        elif value > best[p, up]:
            old, best[p, up] = best[p, up], value
        elif old == best[p, up]:
            if not gather(best, ways, levels, p, level, group, False):
                return
            value = best[p, up]
        else:
            return
        k = up


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
