"""All nodes on shelves, one index for all kinds of pieces: of those alike (equally acceptable to every job) the ones with as
many free GPUs.

Where a placement scores a node by its free GPUs alone, the nodes of a shelf are equally good for a piece. So each kind has the
order in which it looks at the shelves, found out beforehand, and on a shelf it takes the first node with enough cores and
memory. A shelf has a tree over the nodes of the most cores, and one of the most memory, that are free of any node of a block;
the search goes down only where both are enough.

A change of a node moves it from one shelf to another, once for all kinds, when the next of them asks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import FEWEST, HIGHEST, READ, SHELVES, TIES, WRITTEN, fits
from weft.cluster.engine.tree import FAN, NEVER, update

# `best`: for each shelf a row of free cores (NEVER: the node lies elsewhere; inf: not known), then for each a row of free
# memory where pieces ask any; the last row but one: the shelf that a node would lie on without a free GPU; the last: the one
# that it lies on, -1 for none. Nodes with fewer free GPUs than any piece asks (`meta[FEWEST]`) are on none.
# `ways` [P, 2 shelves + 1]: for each kind the shelves in the order in which it looks at them, each with a number that equally
# good ones share; then -1.
MOST = 256


def orders(
    score: Callable[..., Any], context: NDArray[Any], pieces: NDArray[Any], nodes: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.int64], int] | None:
    """What ``ways`` holds; the shelf that each node would lie on without a free GPU [N]; how many shelves there are.

    None where the score looks at more than the GPUs that a piece asks and those that a node has free, or where there would be
    more than MOST shelves.
    """
    if not len(pieces):
        return None
    fewest = int(pieces["gpus"].min())
    _, first, alike = np.unique(nodes["groups"], return_index=True, return_inverse=True)
    most = np.zeros(len(first), np.int64)
    np.maximum.at(most, alike, nodes["gpus"])
    widths = np.maximum(most + 1 - fewest, 0)
    begins, count = np.cumsum(widths) - widths, int(widths.sum())
    if not 0 < count <= MOST:
        return None
    ways = np.full((len(pieces), 2 * count + 1), -1, np.int32)
    for p, piece in enumerate(pieces):
        found = []
        for begin, width, n in zip(begins, widths, first, strict=True):
            if not takes(piece, nodes[n]):
                continue
            for free in range(int(piece["gpus"]), fewest + int(width)):
                try:
                    value = 0.0 if piece["counted"] else value_of(score, context, int(piece["gpus"]), free)
                except (AttributeError, ArithmeticError):
                    return None
                if value > NEVER:
                    found.append((-value, int(begin) + free - fewest))
        ranks = {value: k for k, value in enumerate(sorted({value for value, _ in found}))}
        for i, (value, shelf) in enumerate(sorted(found)):
            ways[p, 2 * i : 2 * i + 2] = shelf, ranks[value]
    return ways, begins[alike] - fewest, count


def value_of(score: Callable[..., Any], context: NDArray[Any], gpus: int, free: int) -> float:
    """The score of a node of which nothing is known but its free GPUs."""
    seen = (SimpleNamespace(gpus=gpus), SimpleNamespace(free_gpus=free), context)
    return float(score(*seen[: len(inspect.signature(score).parameters)]))


def takes(piece: Any, node: Any) -> bool:
    """Whether a node is of a type and GPU memory that the piece accepts."""
    if not piece["types"] >> node["gpu_type"] & 1:
        return False
    return bool(piece["gpu_memory"] <= 0 or node["gpu_memory"] < 0 or node["gpu_memory"] >= piece["gpu_memory"])


def rows(shelf_of: NDArray[np.int64], count: int, entries: int, pieces: NDArray[Any]) -> NDArray[np.float64]:
    """What ``best`` holds while all shelves are empty."""
    best = np.full((count * (1 + bool((pieces["memory"] > 0).any())) + 2, entries), NEVER)
    best[-2, : len(shelf_of)] = shelf_of
    best[-1] = -1
    return best


@compiled
def put(nodes, best, ways, levels, meta, n):
    """Node n comes to the shelf where it belongs now."""
    last, shelves = len(best) - 1, meta[SHELVES]
    old, new = np.int64(best[last, n]), np.int64(-1)
    if nodes[n].free_gpus >= meta[FEWEST]:
        new = np.int64(best[last - 1, n]) + nodes[n].free_gpus
    memory = last - 1 > shelves
    if old >= 0 and old != new:
        update(best, ways, levels, old, n, NEVER, False)
        if memory:
            update(best, ways, levels, shelves + old, n, NEVER, False)
    best[last, n] = new
    if new < 0:
        return
    free = nodes[n].free_cpu if nodes[n].cpu >= 0 else np.inf
    if best[new, n] != free:
        update(best, ways, levels, new, n, free, False)
    if memory:
        free = nodes[n].free_memory if nodes[n].memory >= 0 else np.inf
        if best[shelves + new, n] != free:
            update(best, ways, levels, shelves + new, n, free, False)


@compiled
def tidy(nodes, best, ways, levels, log, meta):
    """Puts every node that changed on its shelf."""
    written, read = meta[WRITTEN], meta[READ]
    meta[READ] = written
    if read < 0 or written - read > len(log):
        for n in range(len(nodes)):
            put(nodes, best, ways, levels, meta, n)
        return
    for entry in range(read, written):
        put(nodes, best, ways, levels, meta, log[entry & (len(log) - 1)])


@compiled
def next_on(nodes, pieces, best, levels, meta, shelf, p, level, k, step):
    """The next node on a shelf, in steps of 1 or -1, that takes a piece of kind p; -1: none. It looks from entry k of a level
    on; at the top that is from the beginning."""
    top = len(levels) - 2
    cpu, memory, other = np.float64(pieces[p].cpu), np.float64(pieces[p].cpu), shelf
    if len(best) - 2 > meta[SHELVES]:
        memory, other = np.float64(pieces[p].memory), shelf + meta[SHELVES]
    while True:
        size = levels[level + 1] - levels[level]
        if not 0 <= k < size:
            return np.int64(-1)
        group = k // FAN
        found = False
        while k // FAN == group and k < size:
            entry = levels[level] + k
            found = best[shelf, entry] >= cpu and best[other, entry] >= memory
            if found and level == 0 and pieces[p].outlasting:
                found = fits(nodes[k], pieces[p])
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


@compiled
def choose_on_shelves(nodes, pieces, best, ways, levels, log, meta, p):
    """The best node for a piece of kind p, of equal ones the first or the last; -1 where it fits nowhere."""
    tidy(nodes, best, ways, levels, log, meta)
    top, step = len(levels) - 2, -1 if meta[TIES] == HIGHEST else 1
    chosen, rank, i = np.int64(-1), -1, 0
    while ways[p, i] >= 0 and (chosen < 0 or ways[p, i + 1] == rank):
        n = next_on(nodes, pieces, best, levels, meta, ways[p, i], p, top, np.int64(0), step)
        if n >= 0 and (chosen < 0 or (n - chosen) * step < 0):
            chosen, rank = n, ways[p, i + 1]
        i += 2
    return chosen


@compiled
def able_on_shelves(nodes, pieces, best, ways, levels, log, meta, p, least):
    """Whether at least so many nodes take a piece of kind p each."""
    if pieces[p].read == meta[WRITTEN] and (pieces[p].fitting >= least or pieces[p].fitting == 0):
        return pieces[p].fitting >= least
    tidy(nodes, best, ways, levels, log, meta)
    top, i, found = len(levels) - 2, 0, 0
    while ways[p, i] >= 0 and found < least:
        n = next_on(nodes, pieces, best, levels, meta, ways[p, i], p, top, np.int64(0), 1)
        while n >= 0:
            found += 1
            if found == least:
                break
            n = next_on(nodes, pieces, best, levels, meta, ways[p, i], p, 0, n + 1, 1)
        i += 2
    pieces[p].fitting, pieces[p].read = found, meta[WRITTEN]
    return found >= least
