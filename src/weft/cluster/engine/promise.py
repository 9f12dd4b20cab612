"""What the head of the queue is promised under EASY backfill, compiled (``weft.cluster.promise`` is the plain form of it).

For each node there is a list of what runs there, or is planned to; for each kind of piece a tree over the moments at which
nodes will fit it.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import allocating, compiled
from weft.cluster.engine.node import DETAILED, WRITTEN, times
from weft.cluster.engine.run import RUNNING
from weft.cluster.engine.tree import FAN, NEVER, gather, update
from weft.cluster.model import WHOLE

# A place of a job on a node: the next and the previous one on the same node (-1: none), its job, its kind of piece.
PLACE = np.dtype([(name, "i4") for name in ("next", "previous", "job", "piece")])


# ---- what stays on a node ----------------------------------------------------------------------------------------------


@compiled
def settle_on(first, places, where, slot, count, job, piece, rest):
    """Enters a started job in the lists of its nodes."""
    for i in range(slot, slot + count):
        n = where[i]
        places[i].job, places[i].previous, places[i].next = job, -1, first[n]
        places[i].piece = rest if rest >= 0 and i == slot + count - 1 else piece
        if first[n] >= 0:
            places[first[n]].previous = i
        first[n] = i


@compiled
def leave(first, places, where, slot, count):
    for i in range(slot, slot + count):
        before, after = places[i].previous, places[i].next
        if before >= 0:
            places[before].next = after
        else:
            first[where[i]] = after
        if after >= 0:
            places[after].previous = before


# ---- when a node will fit a piece ---------------------------------------------------------------------------------------


@compiled
def free_at(nodes, pieces, first, places, jobs, n, when):
    """GPUs, cores and memory free of node n once everything there has ended that should by ``when``."""
    gpus, cpu, memory = np.int64(nodes[n].free_gpus), nodes[n].free_cpu, nodes[n].free_memory
    slot = first[n]
    while slot >= 0:
        if jobs[places[slot].job].ends <= when:
            taken = pieces[places[slot].piece]
            gpus += taken.gpus
            cpu += taken.cpu
            memory += taken.memory
        slot = places[slot].next
    return gpus, cpu, memory


@compiled
def free_of_gpu_at(nodes, pieces, first, places, on, jobs, n, g, when):
    """The same of one GPU, in thousandths."""
    free = np.int64(nodes[n].milli[g])
    slot = first[n]
    while slot >= 0:
        if (on[slot] >> g) & 1 and jobs[places[slot].job].ends <= when:
            free += pieces[places[slot].piece].milli
        slot = places[slot].next
    return free


@compiled
def fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, when):
    """Whether node n fits a piece once everything there has ended that should by ``when``."""
    node, piece = nodes[n], pieces[p]
    if not (piece.types >> node.gpu_type) & 1 or (piece.gpu_memory > 0 and 0 <= node.gpu_memory < piece.gpu_memory):
        return False
    gpus, cpu, memory = free_at(nodes, pieces, first, places, jobs, n, when)
    if meta[DETAILED]:
        able = 0
        for g in range(node.gpus):
            free = free_of_gpu_at(nodes, pieces, first, places, on, jobs, n, g, when)
            able += free >= piece.milli
        gpus = able
    return gpus >= piece.gpus and (node.cpu < 0 or cpu >= piece.cpu) and (node.memory < 0 or memory >= piece.memory)


@compiled
def soonest(nodes, pieces, first, places, on, jobs, meta, n, p):
    """When node n will fit a piece of kind p by the estimates of what runs there: -inf now, inf never."""
    if fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, -np.inf):
        return -np.inf
    if not fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, np.inf):
        return np.inf
    low, high = np.inf, -np.inf  # it does not fit just before low, and it does at high
    slot = first[n]
    while slot >= 0:
        low, high = min(low, jobs[places[slot].job].ends), max(high, jobs[places[slot].job].ends)
        slot = places[slot].next
    if fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, low):
        return low
    while True:
        middle, found, gap = (low + high) / 2, np.inf, np.inf  # of the ends in between, the one nearest to their middle
        slot = first[n]
        while slot >= 0:
            ends = jobs[places[slot].job].ends
            if low < ends < high and abs(ends - middle) < gap:
                found, gap = ends, abs(ends - middle)
            slot = places[slot].next
        if found == np.inf:
            return high
        if fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, found):
            high = found
        else:
            low = found


@compiled
def refresh_soonest(nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, meta, p):
    """Brings the tree of kind p over (minus) the moments up to date."""
    written, since = meta[WRITTEN], read[p]
    read[p] = written
    if since < 0 or written - since > len(log):
        soon[p, :] = NEVER
        for n in range(len(nodes)):
            soon[p, n] = -soonest(nodes, pieces, first, places, on, jobs, meta, n, p)
        for level in range(len(levels) - 2):
            for group in range((levels[level + 1] - levels[level]) // FAN):
                gather(soon, ways, levels, p, level, group, False)
        return
    for entry in range(since, written):
        n = log[entry & (len(log) - 1)]
        value = -soonest(nodes, pieces, first, places, on, jobs, meta, n, p)
        if soon[p, n] != value:
            update(soon, ways, levels, p, n, value, False)


@compiled
def take_soonest(soon, ways, levels, p, promised, moments, have, count):
    """The ``count`` nodes that are first able to take kind p, lowest numbers first where equal, to ``promised[have:]``; those
    that are there already are passed over. Says how many there are now; -1 where there are not enough."""
    for i in range(have):
        moments[i] = soon[p, promised[i]]
        update(soon, ways, levels, p, promised[i], NEVER, False)
    total = have
    while total < have + count:
        k = levels[len(levels) - 2]
        top = soon[p, k]
        if top == NEVER:
            break
        for level in range(len(levels) - 3, -1, -1):
            k = levels[level] + (k - levels[level + 1]) * FAN
            while soon[p, k] != top:
                k += 1
        promised[total], moments[total] = k, top
        update(soon, ways, levels, p, k, NEVER, False)
        total += 1
    for i in range(total):
        update(soon, ways, levels, p, promised[i], moments[i], False)
    return total if total == have + count else -1


# ---- the promise --------------------------------------------------------------------------------------------------------


@compiled
def capacity_at(nodes, pieces, first, places, on, jobs, meta, n, p, when, most):
    """How many pieces of kind p, up to ``most``, node n takes at once when what should end by then has ended."""
    if not fits_at(nodes, pieces, first, places, on, jobs, meta, n, p, when):
        return 0
    node, piece = nodes[n], pieces[p]
    gpus, cpu, memory = free_at(nodes, pieces, first, places, jobs, n, when)
    if meta[DETAILED]:
        gpus = np.int64(0)
        for g in range(node.gpus):
            free = free_of_gpu_at(nodes, pieces, first, places, on, jobs, n, g, when)
            gpus += free // piece.milli if piece.gpus == 1 else free >= piece.milli
    if piece.milli < WHOLE and piece.gpus > 1:
        most = 1  # how many more depends on which GPUs they take
    return times(node, piece, most, gpus, cpu, memory)


@compiled
def promise(
    nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, running, progress, meta, classes, c, promised, held,
    moments,
):  # fmt: skip
    """Fills ``promised`` with the nodes for a job of class c and ``held`` with how many of its pieces each is to take (the last
    one's may be the remainder): how many nodes, and the moment."""
    p, count, rest = classes[c].piece, classes[c].count, classes[c].rest
    refresh_soonest(nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, meta, p)
    if classes[c].shared and count > 1:
        return promise_shared(
            nodes, pieces, soon, first, places, on, jobs, running, progress, meta, p, count, promised, held
        )
    total = take_soonest(soon, ways, levels, p, promised, moments, 0, count)
    shadow = -np.inf
    for i in range(total):
        shadow = max(shadow, -moments[i])
        held[i] = 1
    if rest >= 0 and total >= 0:
        refresh_soonest(nodes, pieces, soon, read, ways, levels, log, first, places, on, jobs, meta, rest)
        total = take_soonest(soon, ways, levels, rest, promised, moments, total, 1)
        if total >= 0:
            shadow, held[total - 1] = max(shadow, -moments[total - 1]), 1
    return total, shadow


@allocating
def promise_shared(
    nodes, pieces, soon, first, places, on, jobs, running, progress, meta, p, count, promised, held
):  # fmt: skip
    """The same for pieces that may lie on one node: the first moment at which all nodes together take them all."""
    ends = np.empty(progress[RUNNING])
    for i in range(progress[RUNNING]):
        ends[i] = jobs[running[i].job].ends
    ends.sort()
    low, high = -1, len(ends) - 1  # not all fit at ends[low]; at the last end they do, as in an empty cluster
    while high - low > 1:
        middle, able = (low + high) // 2, 0
        for n in range(len(nodes)):
            able += capacity_at(nodes, pieces, first, places, on, jobs, meta, n, p, ends[middle], count)
        if able >= count:
            high = middle
        else:
            low = middle
    shadow = ends[high]
    order = np.argsort(-soon[p, : len(nodes)], kind="mergesort")
    total, left = np.int64(0), count
    for n in order:
        able = min(left, capacity_at(nodes, pieces, first, places, on, jobs, meta, n, p, shadow, left))
        if able > 0:
            promised[total], held[total] = n, able
            total += 1
            left -= able
        if left == 0:
            break
    return total, shadow


@compiled
def hold(nodes, pieces, log, first, places, jobs, meta, classes, c, promised, held, total, shadow):
    """Writes on each promised node what jobs that outlast the shadow time may take of it."""
    for i in range(total):
        n = promised[i]
        last = classes[c].rest >= 0 and i == total - 1
        piece = pieces[classes[c].rest if last else classes[c].piece]
        gpus, cpu, memory = free_at(nodes, pieces, first, places, jobs, n, shadow)
        nodes[n].held = 1
        nodes[n].spare_gpus = gpus - held[i] * piece.gpus if not meta[DETAILED] else -1  # -1: nothing at all
        nodes[n].spare_cpu = cpu - held[i] * piece.cpu
        nodes[n].spare_memory = memory - held[i] * piece.memory
        changed(log, meta, n)


@compiled
def let_go(nodes, log, meta, promised, total):
    for i in range(total):
        nodes[promised[i]].held = 0
        changed(log, meta, promised[i])


@compiled
def changed(log, meta, n):
    log[meta[WRITTEN] & (len(log) - 1)] = n
    meta[WRITTEN] += 1
