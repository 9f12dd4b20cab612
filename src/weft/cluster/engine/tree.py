"""A tree of maxima over the nodes, sixteen children to a parent."""

import numpy as np

from weft.cluster.engine.compiled import compiled

# `best` [rows, entries]: each row a tree: its leaves, padded to a multiple of FAN, then the largest of each FAN of them
# (two cache lines), padded, and so on up to one. `levels`: where each level begins, and where the last one ends.
# `ways`: how many leaves share an entry's value, for random ties.
FAN = 16
NEVER = -np.inf


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
