"""What nodes yield to a piece: the most important job that would have to be stopped there.

Every node keeps its jobs in a list, the least important first, so that what must be stopped is read from its head. For each
kind of piece a tree over the nodes holds what they yield, so that the best node to stop jobs on is found from the root.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import WRITTEN, fits
from weft.cluster.engine.standing import DRIFT, SINGLE, standing_at, stands_before
from weft.cluster.engine.tree import FAN, NEVER, gather, update
from weft.cluster.model import WHOLE
from weft.cluster.order import FREE

# A place of a job on a node: the next less and the next more important on the same node (-1: none); where single GPUs are
# looked at, a bit for each that it holds, and for those that it took before it made way for another (engine/room.py).
PLACE = np.dtype(
    [*((name, "i4") for name in ("next", "previous", "job", "piece", "gpus", "before")), ("standing", "f8")]
)

# `first` [N]: the head of a node's list; `sorted_at` [N]: the moment for which standings that change freely were worked out.


@compiled
def sit(first, places, n, i):
    """Puts place i into the list of node n."""
    before, after, standing, job = np.int32(-1), first[n], places[i].standing, places[i].job
    while after >= 0 and (
        places[after].standing > standing or (places[after].standing == standing and places[after].job > job)
    ):
        before, after = after, places[after].next
    places[i].previous, places[i].next = before, after
    if before >= 0:
        places[before].next = i
    else:
        first[n] = i
    if after >= 0:
        places[after].previous = i


@compiled
def sort(first, places, sorted_at, jobs, rules, n, now):
    """Works out the standings of everyone on node n for this moment."""
    if sorted_at[n] == now:
        return
    sorted_at[n] = now
    last, i = -1, int(first[n])
    while i >= 0:  # the other way round: standings keep most of their order, and `sit` then stops at once
        places[i].standing = standing_at(jobs, places[i].job, rules, now)
        last, i = i, int(places[i].next)
    first[n] = -1
    while last >= 0:
        earlier = int(places[last].previous)
        sit(first, places, n, last)
        last = earlier


@compiled
def yields(nodes, pieces, first, places, sorted_at, jobs, rules, n, p, now):
    """The most important job that node n must stop to take a piece of kind p: its standing and number. inf where it fits as
    things are, NEVER where nothing helps."""
    node, piece = nodes[n], pieces[p]
    if not (piece.types >> node.gpu_type) & 1 or (piece.gpu_memory > 0 and 0 <= node.gpu_memory < piece.gpu_memory):
        return NEVER, np.int64(-1)
    if rules[DRIFT] == FREE:
        sort(first, places, sorted_at, jobs, rules, n, now)
    if rules[SINGLE]:
        return yields_gpus(nodes, pieces, first, places, n, p)
    gpus, cpu, memory = np.int64(node.free_gpus), node.free_cpu, node.free_memory
    standing, job, i = np.inf, np.int64(-1), first[n]
    while gpus < piece.gpus or (node.cpu >= 0 and cpu < piece.cpu) or (node.memory >= 0 and memory < piece.memory):
        if i < 0:
            return NEVER, np.int64(-1)
        taken = pieces[places[i].piece]
        gpus += taken.gpus
        cpu += taken.cpu
        memory += taken.memory
        standing, job, i = places[i].standing, np.int64(places[i].job), places[i].next
    return standing, job


@compiled
def yields_gpus(nodes, pieces, first, places, n, p):
    """The same where single GPUs are looked at: places are taken off the node, and put back when it fits."""
    standing, job, i = np.inf, np.int64(-1), first[n]
    while i >= 0 and not fits(nodes[n], pieces[p]):
        lend(nodes[n], pieces[places[i].piece], places[i].gpus, 1)
        standing, job, i = places[i].standing, np.int64(places[i].job), places[i].next
    able, back = fits(nodes[n], pieces[p]), first[n]
    while back != i:
        lend(nodes[n], pieces[places[back].piece], places[back].gpus, -1)
        back = places[back].next
    if not able:
        return NEVER, np.int64(-1)
    return standing, job


@compiled
def lend(node, piece, gpus, sign):
    """What a piece holds is free for a moment (sign 1), and no more (-1): only `fits` may look."""
    for g in range(node.gpus):
        if (gpus >> g) & 1:
            before = node.milli[g]
            node.milli[g] = before + sign * piece.milli
            node.free_gpus += int(node.milli[g] == WHOLE) - int(before == WHOLE)
    node.free_cpu += sign * piece.cpu
    node.free_memory += sign * piece.memory


@compiled
def refresh_yields(
    nodes, pieces, tree, read, asked, ways, levels, log, first, places, sorted_at, jobs, rules, meta, p, now
):
    """Brings the tree of kind p up to date."""
    written, since = meta[WRITTEN], read[p]
    read[p] = written
    stale = rules[DRIFT] == FREE and asked[p] != now
    asked[p] = now
    if stale or since < 0 or written - since > len(log):
        tree[p, :] = NEVER
        for n in range(len(nodes)):
            tree[p, n] = yields(nodes, pieces, first, places, sorted_at, jobs, rules, n, p, now)[0]
        for level in range(len(levels) - 2):
            for group in range((levels[level + 1] - levels[level]) // FAN):
                gather(tree, ways, levels, p, level, group, False)
        return
    for entry in range(since, written):
        n = log[entry & (len(log) - 1)]
        value = yields(nodes, pieces, first, places, sorted_at, jobs, rules, n, p, now)[0]
        if tree[p, n] != value:
            update(tree, ways, levels, p, n, value, False)


@compiled
def yielding(nodes, pieces, tree, levels, first, places, sorted_at, jobs, rules, p, limit, j, now, most):
    """How many nodes, up to ``most``, yield jobs that all stand after waiting job j; and the first of those that yield most,
    -1 for none."""
    count, best, value = 0, -1, NEVER
    for group in range((levels[1] - levels[0]) // FAN):
        if len(levels) > 2 and not tree[p, levels[1] + group] >= limit:
            continue
        for n in range(group * FAN, group * FAN + FAN):
            if tree[p, n] < limit or tree[p, n] == NEVER:
                continue
            if tree[p, n] == limit:
                _, job = yields(nodes, pieces, first, places, sorted_at, jobs, rules, n, p, now)
                if not stands_before(limit, j, limit, job, rules):
                    continue
            count += 1
            if tree[p, n] > value:
                best, value = n, tree[p, n]
        if count >= most:
            break
    return count, best


@compiled
def best_yield(nodes, pieces, tree, levels, first, places, sorted_at, jobs, rules, p, limit, j, now):
    """The node whose most important victim is the least important, the lowest number of equal ones; -1 where all stand before
    waiting job j."""
    k = levels[len(levels) - 2]
    top = tree[p, k]
    if top < limit or top == NEVER:
        return np.int64(-1)
    if top == limit:
        all_nodes = len(nodes) + 1
        found = yielding(
            nodes, pieces, tree, levels, first, places, sorted_at, jobs, rules, p, limit, j, now, all_nodes
        )
        return np.int64(found[1])
    for level in range(len(levels) - 3, -1, -1):
        k = levels[level] + (k - levels[level + 1]) * FAN
        while tree[p, k] != top:
            k += 1
    return k


@compiled
def best_yield_among(
    nodes, pieces, tree, first, places, sorted_at, jobs, rules, p, limit, j, now, begin, end
):  # fmt: skip
    """The same of the nodes from ``begin`` to ``end`` in the order of racks."""
    chosen, top = np.int64(-1), NEVER
    for k in range(begin, end):
        n = np.int64(nodes[k].member)
        if tree[p, n] < limit or tree[p, n] <= top:
            continue
        if tree[p, n] == limit:
            _, job = yields(nodes, pieces, first, places, sorted_at, jobs, rules, n, p, now)
            if not stands_before(limit, j, limit, job, rules):
                continue
        chosen, top = n, tree[p, n]
    return chosen
