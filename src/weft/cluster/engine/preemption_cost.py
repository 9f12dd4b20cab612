"""The preemption cost of a node for a piece: the most important job that it would have to evict.

Every node has its pieces in a list, the least important job first, so that the victims are read from its head. For each
kind of piece a tree over the nodes holds their costs, so that the best node to preempt on is found from the root.
"""

import numpy as np

from weft.cluster.engine.compiled import compiled, inlined
from weft.cluster.engine.node import WRITTEN, accepts, fits
from weft.cluster.engine.preemption_keys import DRIFT, SINGLE, may_preempt, running_key
from weft.cluster.engine.tree import FAN, NEVER, gather, update
from weft.cluster.model import WHOLE
from weft.cluster.order import FREE

# A piece on a node: the next less and the next more important on the same node (-1: none); where single GPUs are
# tracked, a bit for each that it holds, and for those that it took before it exchanged them, on its node of before
# (preemption_allocate.py).
PLACED = np.dtype(
    [(name, "i4") for name in ("next", "previous", "job", "piece", "gpus", "before", "node_before")] + [("key", "f8")]
)


@inlined
def insert(q, n, i):
    """Puts piece i into the list of node n."""
    first, placed = q.first, q.placed
    before, after, key, job = np.int32(-1), first[n], placed[i].key, placed[i].job
    while after >= 0 and (placed[after].key > key or (placed[after].key == key and placed[after].job > job)):
        before, after = after, placed[after].next
    placed[i].previous, placed[i].next = before, after
    if before >= 0:
        placed[before].next = i
    else:
        first[n] = i
    if after >= 0:
        placed[after].previous = i


@compiled
def sort(q, n, now):
    """Computes the keys of all jobs on node n for this time."""
    first, placed = q.first, q.placed
    if q.sorted_at[n] == now:
        return
    q.sorted_at[n] = now
    last, i = -1, int(first[n])
    while i >= 0:  # the other way round: keys keep most of their order, and `insert` then stops at once
        placed[i].key = running_key(q, placed[i].job, now)
        last, i = i, int(placed[i].next)
    first[n] = -1
    while last >= 0:
        earlier = int(placed[last].previous)
        insert(q, n, last)
        last = earlier


@inlined
def cost(s, q, n, p, now):
    """The most important job that node n must evict to take a piece of kind p: its key and number. inf where it fits as
    things are, NEVER where evicting does not help."""
    node, piece, placed = s.nodes[n], s.pieces[p], q.placed
    if not accepts(node, piece):
        return NEVER, np.int64(-1)
    if q.rules[DRIFT] == FREE:
        sort(q, n, now)
    if q.rules[SINGLE]:
        return cost_by_gpu(s, q, n, p)
    gpus, cpu, memory = np.int64(node.free_gpus), node.free_cpu, node.free_memory
    key, job, i = np.inf, np.int64(-1), q.first[n]
    while gpus < piece.gpus or (node.cpu >= 0 and cpu < piece.cpu) or (node.memory >= 0 and memory < piece.memory):
        if i < 0:
            return NEVER, np.int64(-1)
        taken = s.pieces[placed[i].piece]
        gpus += taken.gpus
        cpu += taken.cpu
        memory += taken.memory
        key, job, i = placed[i].key, np.int64(placed[i].job), placed[i].next
    return key, job


@compiled
def cost_by_gpu(s, q, n, p):
    """The same where single GPUs are tracked: pieces are taken off the node, and put back when it fits."""
    placed = q.placed
    key, job, i = np.inf, np.int64(-1), q.first[n]
    while i >= 0 and not fits(s.nodes[n], s.pieces[p]):
        lend(s.nodes[n], s.pieces[placed[i].piece], placed[i].gpus, 1)
        key, job, i = placed[i].key, np.int64(placed[i].job), placed[i].next
    able, back = fits(s.nodes[n], s.pieces[p]), q.first[n]
    while back != i:
        lend(s.nodes[n], s.pieces[placed[back].piece], placed[back].gpus, -1)
        back = placed[back].next
    if not able:
        return NEVER, np.int64(-1)
    return key, job


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


@inlined
def refresh_costs(s, q, p, now):
    """Brings the tree of kind p up to date."""
    costs, written, since = q.costs, s.meta[WRITTEN], q.read[p]
    q.read[p] = written
    stale = q.rules[DRIFT] == FREE and q.costs_at[p] != now
    q.costs_at[p] = now
    every = stale or since < 0 or written - since > len(s.log)
    if every:
        costs[p, :] = NEVER
    for entry in range(len(s.nodes) if every else written - since):
        n = np.int64(entry) if every else np.int64(s.log[(since + entry) & (len(s.log) - 1)])
        value = cost(s, q, n, p, now)[0]
        if every:
            costs[p, n] = value
        elif costs[p, n] != value:
            update(costs, s.ways, s.levels, p, n, value, False)
    if every:
        for level in range(len(s.levels) - 2):
            for group in range((s.levels[level + 1] - s.levels[level]) // FAN):
                gather(costs, s.ways, s.levels, p, level, group, False)


@compiled
def may_preempt_on(s, q, n, p, limit, j, now):
    """Whether waiting job j may evict all jobs that node n must evict for a piece of kind p, where the cost equals its key."""
    _, job = cost(s, q, n, p, now)
    return may_preempt(q, limit, j, limit, job)


@inlined
def count_nodes(s, q, p, limit, j, now, most):
    """On how many nodes, up to ``most``, waiting job j may preempt; and the first of those with the least important
    victims, -1 for none."""
    costs, levels = q.costs, s.levels
    count, best, value = 0, -1, NEVER
    for group in range((levels[1] - levels[0]) // FAN):
        if len(levels) > 2 and not costs[p, levels[1] + group] >= limit:
            continue
        for n in range(group * FAN, group * FAN + FAN):
            if costs[p, n] < limit or costs[p, n] == NEVER:
                continue
            if costs[p, n] == limit and not may_preempt_on(s, q, n, p, limit, j, now):
                continue
            count += 1
            if costs[p, n] > value:
                best, value = n, costs[p, n]
        if count >= most:
            break
    return count, best


@inlined
def cheapest_node(s, q, p, limit, j, now):
    """The node whose most important victim is the least important, the lowest number of equal ones; -1 where waiting
    job j may preempt on none."""
    costs, levels = q.costs, s.levels
    k = levels[len(levels) - 2]
    top = costs[p, k]
    if top < limit or top == NEVER:
        return np.int64(-1)
    if top == limit:
        return np.int64(count_nodes(s, q, p, limit, j, now, len(s.nodes) + 1)[1])
    for level in range(len(levels) - 3, -1, -1):
        k = levels[level] + (k - levels[level + 1]) * FAN
        while costs[p, k] != top:
            k += 1
    return k


@inlined
def cheapest_node_among(s, q, p, limit, j, now, begin, end):
    """The same of the nodes from ``begin`` to ``end`` in the order of racks."""
    chosen, top = np.int64(-1), NEVER
    for k in range(begin, end):
        n = np.int64(s.nodes[k].member)
        if q.costs[p, n] < limit or q.costs[p, n] <= top:
            continue
        if q.costs[p, n] == limit and not may_preempt_on(s, q, n, p, limit, j, now):
            continue
        chosen, top = n, q.costs[p, n]
    return chosen
