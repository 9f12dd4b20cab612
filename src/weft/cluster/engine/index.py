"""Which node a piece of a job goes to.

A *piece* is what one node must give: GPUs of some type and memory, cores, main memory. Jobs of a trace have few kinds
of pieces. A change of a node is written to a log, which each index reads from where it last stopped when it is asked.
There are two kinds of index:

*Score trees*: for each kind a tree with the score of every node (-inf where it does not fit), so that the best node is
found from the root.

*Buckets*, where the placement scores a node by its free GPUs alone, one index for all kinds: nodes that are equally
acceptable to every job, and have as many free GPUs, share a bucket, and are equally good for a piece. Each kind has the
order in which it looks at the buckets, computed beforehand, and takes the first node of a bucket with enough cores and
memory. A bucket has a tree over the most free cores, and one over the most free memory, of any node of a block; the
search descends only where both are enough. A change of a node moves it to another bucket once for all kinds.
"""

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine.compiled import compiled, inlined
from weft.cluster.engine.node import (
    BUCKETS,
    FEWEST,
    HIGHEST,
    LOWEST,
    PLACEMENT,
    RANDOM,
    READ,
    TIES,
    WRITTEN,
    below,
    fits,
    score,
)
from weft.cluster.engine.tree import FAN, NEVER, gather, update

# Score trees: `best` [P, entries] (tree.py), with `levels` and `ways`. Buckets: `best` has for each bucket a row of
# free cores (NEVER: the node is in another bucket; inf: unknown), then for each a row of free memory where pieces
# request any; the last row but one: the bucket that a node would be in without a free GPU; the last: the one that it is
# in, -1 for none. Nodes with fewer free GPUs than any piece requests (`meta[FEWEST]`) are in none. `ways` [P, 2 buckets
# + 1]: for each kind the buckets in the order in which it looks at them, each with a number that equally good ones
# share; then -1.


@compiled
def choose(s, p):
    """The node with the highest score for a piece of kind p, ties by the rule; -1 where it fits nowhere."""
    if s.meta[BUCKETS]:
        return choose_from_buckets(s, p)
    refresh(s, p)
    best, ways, levels = s.best, s.ways, s.levels
    k = levels[len(levels) - 2]
    top = best[p, k]
    if top == NEVER:
        return -1
    rule = s.meta[TIES]
    skip = below(s.meta, ways[p, k]) if rule == RANDOM else 0
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
            while best[p, k] != top or skip >= ways[p, k]:
                if best[p, k] == top:
                    skip -= ways[p, k]
                k += 1
    return k


@compiled
def able(s, p, least):
    """Whether at least so many nodes take a piece of kind p each."""
    if s.meta[BUCKETS]:
        return able_in_buckets(s, p, least)
    refresh(s, p)
    return s.pieces[p].fitting >= least


# ---- score trees -----------------------------------------------------------------------------------------------------


@compiled
def score_of(s, n, p):
    if not fits(s.nodes[n], s.pieces[p]):
        return NEVER
    return 0.0 if s.pieces[p].counted else score(s.meta[PLACEMENT], s.pieces[p], s.nodes[n], s.context)


@compiled
def build(s, p):
    s.best[p, :] = NEVER
    s.ways[p, :] = 1
    fitting = 0
    for n in range(len(s.nodes)):
        s.best[p, n] = score_of(s, n, p)
        fitting += s.best[p, n] != NEVER
    for level in range(len(s.levels) - 2):
        for group in range((s.levels[level + 1] - s.levels[level]) // FAN):
            gather(s.best, s.ways, s.levels, p, level, group, s.meta[TIES] == RANDOM)
    s.pieces[p].fitting = fitting


@compiled
def refresh(s, p):
    """Brings the tree of kind p up to date."""
    written, read = s.meta[WRITTEN], s.pieces[p].read
    s.pieces[p].read = written
    if read < 0 or written - read > len(s.log):
        build(s, p)
        return
    random_ties, ring = s.meta[TIES] == RANDOM, len(s.log) - 1
    for entry in range(read, written):
        n = s.log[entry & ring]
        value = score_of(s, n, p)
        if s.best[p, n] != value:
            s.pieces[p].fitting += int(value != NEVER) - int(s.best[p, n] != NEVER)
            update(s.best, s.ways, s.levels, p, n, value, random_ties)


# ---- buckets ---------------------------------------------------------------------------------------------------------

MOST_BUCKETS = 256


def bucket_order(
    score: Callable[..., Any], context: NDArray[Any], pieces: NDArray[Any], nodes: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.int64], int] | None:
    """``ways``; the bucket that each node would be in without a free GPU [N]; how many buckets there are.

    None where the score looks at more than the GPUs that a piece requests and those that a node has free, or where
    there would be more than MOST_BUCKETS.
    """
    if not len(pieces):
        return None
    fewest = int(pieces["gpus"].min())
    _, first, alike = np.unique(nodes["groups"], return_index=True, return_inverse=True)
    most = np.zeros(len(first), np.int64)
    np.maximum.at(most, alike, nodes["gpus"])
    widths = np.maximum(most + 1 - fewest, 0)
    begins, count = np.cumsum(widths) - widths, int(widths.sum())
    if not 0 < count <= MOST_BUCKETS:
        return None
    ways = np.full((len(pieces), 2 * count + 1), -1, np.int32)
    for p, piece in enumerate(pieces):
        found = []
        for begin, width, n in zip(begins, widths, first, strict=True):
            if not _accepts(piece, nodes[n]):
                continue
            for free in range(int(piece["gpus"]), fewest + int(width)):
                try:
                    value = 0.0 if piece["counted"] else _score_of_free(score, context, int(piece["gpus"]), free)
                except Exception:  # it looks at more, or fails: where that counts, the engine says so
                    return None
                if not math.isfinite(value):
                    return None
                found.append((-value, int(begin) + free - fewest))
        ranks = {value: k for k, value in enumerate(sorted({value for value, _ in found}))}
        for i, (value, bucket) in enumerate(sorted(found)):
            ways[p, 2 * i : 2 * i + 2] = bucket, ranks[value]
    return ways, begins[alike] - fewest, count


def _score_of_free(score: Callable[..., Any], context: NDArray[Any], gpus: int, free: int) -> float:
    """The score of a node of which nothing is known but its free GPUs."""
    arguments = (SimpleNamespace(gpus=gpus), SimpleNamespace(free_gpus=free), context)
    return float(score(*arguments[: len(inspect.signature(score).parameters)]))


def _accepts(piece: Any, node: Any) -> bool:
    """Whether a node is of a type and GPU memory that the piece accepts."""
    if not piece["types"] >> node["gpu_type"] & 1:
        return False
    return bool(piece["gpu_memory"] <= 0 or node["gpu_memory"] < 0 or node["gpu_memory"] >= piece["gpu_memory"])


def empty_buckets(bucket_of: NDArray[np.int64], count: int, entries: int, pieces: NDArray[Any]) -> NDArray[np.float64]:
    """``best`` while all buckets are empty."""
    best = np.full((count * (1 + bool((pieces["memory"] > 0).any())) + 2, entries), NEVER)
    best[-2, : len(bucket_of)] = bucket_of
    best[-1] = -1
    return best


@inlined
def move(s, n):
    """Node n comes to the bucket where it belongs now."""
    node, best, ways, levels = s.nodes[n], s.best, s.ways, s.levels
    last, buckets = len(best) - 1, s.meta[BUCKETS]
    old, new = np.int64(best[last, n]), np.int64(-1)
    if node.free_gpus >= s.meta[FEWEST]:
        new = np.int64(best[last - 1, n]) + node.free_gpus
    memory = last - 1 > buckets
    if old >= 0 and old != new:
        update(best, ways, levels, old, n, NEVER, False)
        if memory:
            update(best, ways, levels, buckets + old, n, NEVER, False)
    best[last, n] = new
    if new < 0:
        return
    free = node.free_cpu if node.cpu >= 0 else np.inf
    if best[new, n] != free:
        update(best, ways, levels, new, n, free, False)
    if memory:
        free = node.free_memory if node.memory >= 0 else np.inf
        if best[buckets + new, n] != free:
            update(best, ways, levels, buckets + new, n, free, False)


@compiled
def refresh_buckets(s):
    """Moves every node that changed to its bucket."""
    written, read = s.meta[WRITTEN], s.meta[READ]
    s.meta[READ] = written
    every = read < 0 or written - read > len(s.log)
    for entry in range(len(s.nodes) if every else written - read):
        move(s, np.int64(entry) if every else np.int64(s.log[(read + entry) & (len(s.log) - 1)]))


@compiled
def next_in_bucket(s, bucket, p, level, k, step):
    """The next node of a bucket, in steps of 1 or -1, that takes a piece of kind p; -1: none. It looks from entry k of
    a level on; at the top that is from the beginning."""
    best, levels = s.best, s.levels
    top = len(levels) - 2
    cpu, memory, other = np.float64(s.pieces[p].cpu), np.float64(s.pieces[p].cpu), bucket
    if len(best) - 2 > s.meta[BUCKETS]:
        memory, other = np.float64(s.pieces[p].memory), bucket + s.meta[BUCKETS]
    while True:
        size = levels[level + 1] - levels[level]
        if not 0 <= k < size:
            return np.int64(-1)
        group = k // FAN
        found = False
        while k // FAN == group and k < size:
            entry = levels[level] + k
            found = best[bucket, entry] >= cpu and best[other, entry] >= memory
            if found and level == 0 and s.pieces[p].beyond_shadow:
                found = fits(s.nodes[k], s.pieces[p])
            if found:
                break
            k += step
        if found and level == 0:
            return k
        if found:
            level -= 1
            k = k * FAN + (0 if step > 0 else FAN - 1)
        elif level == top:
            return np.int64(-1)
        else:
            level += 1
            k = group + step


@inlined
def choose_from_buckets(s, p):
    """The best node for a piece of kind p, of equal ones the first or the last; -1 where it fits nowhere."""
    refresh_buckets(s)
    top, step = len(s.levels) - 2, -1 if s.meta[TIES] == HIGHEST else 1
    chosen, rank, i = np.int64(-1), -1, 0
    while s.ways[p, i] >= 0 and (chosen < 0 or s.ways[p, i + 1] == rank):
        n = next_in_bucket(s, s.ways[p, i], p, top, np.int64(0), step)
        if n >= 0 and (chosen < 0 or (n - chosen) * step < 0):
            chosen, rank = n, s.ways[p, i + 1]
        i += 2
    return chosen


@inlined
def able_in_buckets(s, p, least):
    """Whether at least so many nodes take a piece of kind p each."""
    pieces = s.pieces
    if pieces[p].read == s.meta[WRITTEN] and (pieces[p].fitting >= least or pieces[p].fitting == 0):
        return pieces[p].fitting >= least
    refresh_buckets(s)
    top, i, found = len(s.levels) - 2, 0, 0
    while s.ways[p, i] >= 0 and found < least:
        n = next_in_bucket(s, s.ways[p, i], p, top, np.int64(0), 1)
        while n >= 0:
            found += 1
            if found == least:
                break
            n = next_in_bucket(s, s.ways[p, i], p, 0, n + 1, 1)
        i += 2
    pieces[p].fitting, pieces[p].read = found, s.meta[WRITTEN]
    return found >= least
