"""The reservation of the head of the queue under EASY backfill, compiled (``weft.cluster.reference.backfill`` is the
plain form).

For each node there is a list of the pieces that run there; for each kind of piece a tree over the times at which nodes
will be able to take it.
"""

from typing import Any, NamedTuple

import numpy as np

from weft.cluster.engine.allocate import kind_of, pieces_of
from weft.cluster.engine.compiled import allocating, compiled
from weft.cluster.engine.node import DETAILED, RACKS, TOPOLOGY, WRITTEN, accepts, log_change, times
from weft.cluster.engine.queues import RUNNING
from weft.cluster.engine.tree import FAN, NEVER, gather, update
from weft.cluster.model import WHOLE
from weft.cluster.placement import REQUIRED

# A piece on a node: the next and the previous one on the same node (-1: none), its job, its kind.
PLACED = np.dtype([(name, "i4") for name in ("next", "previous", "job", "piece")])
# `about` the reservation: how many nodes, the shadow time, the class and the rank of the head that it is for (-1:
# none).
NODES, SHADOW, CLASS_OF_HEAD, RANK_OF_HEAD, ABOUT = range(5)


class Reservation(NamedTuple):
    jobs: Any  # [J] queues.JOB
    running: Any  # the heap of completions
    progress: Any  # counters
    first: Any  # [N]: the head of a node's list
    placed: Any  # beside `where`, PLACED
    earliest: Any  # [P, entries]: minus the time at which a node can take a piece of kind p, in a tree
    read: Any  # [P]: how much of the log has been read for that
    nodes: Any  # the reserved nodes
    pieces: Any  # how many pieces of the head each of them is to take (the last one's may be the remainder)
    times: Any  # room for a time a piece
    about: Any  # [ABOUT]


# ---- the pieces on a node --------------------------------------------------------------------------------------------


@compiled
def enter(s, r, c, job, slot):
    """Enters a started job in the lists of its nodes."""
    placed, first = r.placed, r.first
    for i in range(slot, slot + pieces_of(s.classes, c)):
        n = s.where[i]
        placed[i].job, placed[i].previous, placed[i].next = job, -1, first[n]
        placed[i].piece = kind_of(s.classes, c, i - slot)
        if first[n] >= 0:
            placed[first[n]].previous = i
        first[n] = i


@compiled
def leave(first, placed, where, slot, count):
    for i in range(slot, slot + count):
        before, after = placed[i].previous, placed[i].next
        if before >= 0:
            placed[before].next = after
        else:
            first[where[i]] = after
        if after >= 0:
            placed[after].previous = before


# ---- when a node can take a piece ------------------------------------------------------------------------------------


@compiled
def free_at(s, r, n, time):
    """GPUs, cores and memory free of node n after everything there has ended that should by then."""
    gpus, cpu, memory = np.int64(s.nodes[n].free_gpus), s.nodes[n].free_cpu, s.nodes[n].free_memory
    slot = r.first[n]
    while slot >= 0:
        if r.jobs[r.placed[slot].job].ends <= time:
            taken = s.pieces[r.placed[slot].piece]
            gpus += taken.gpus
            cpu += taken.cpu
            memory += taken.memory
        slot = r.placed[slot].next
    return gpus, cpu, memory


@compiled
def free_of_gpu_at(s, r, n, g, time):
    """The same of one GPU, in thousandths."""
    free = np.int64(s.nodes[n].milli[g])
    slot = r.first[n]
    while slot >= 0:
        if (s.on[slot] >> g) & 1 and r.jobs[r.placed[slot].job].ends <= time:
            free += s.pieces[r.placed[slot].piece].milli
        slot = r.placed[slot].next
    return free


@compiled
def fits_at(s, r, n, p, time):
    """Whether a piece fits on node n after everything there has ended that should by then."""
    node, piece = s.nodes[n], s.pieces[p]
    if not accepts(node, piece):
        return False
    gpus, cpu, memory = free_at(s, r, n, time)
    if s.meta[DETAILED]:
        gpus = np.int64(0)
        for g in range(node.gpus):
            gpus += free_of_gpu_at(s, r, n, g, time) >= piece.milli
    return gpus >= piece.gpus and (node.cpu < 0 or cpu >= piece.cpu) and (node.memory < 0 or memory >= piece.memory)


@compiled
def earliest_fit(s, r, n, p):
    """When a piece of kind p will fit on node n by the estimates of what runs there: -inf now, inf never."""
    if fits_at(s, r, n, p, -np.inf):
        return -np.inf
    if not fits_at(s, r, n, p, np.inf):
        return np.inf
    low, high = np.inf, -np.inf  # it does not fit just before low, and it does at high
    slot = r.first[n]
    while slot >= 0:
        low, high = min(low, r.jobs[r.placed[slot].job].ends), max(high, r.jobs[r.placed[slot].job].ends)
        slot = r.placed[slot].next
    if fits_at(s, r, n, p, low):
        return low
    while True:
        middle, found, gap = (low + high) / 2, np.inf, np.inf  # of the ends in between, the one nearest to their middle
        slot = r.first[n]
        while slot >= 0:
            ends = r.jobs[r.placed[slot].job].ends
            if low < ends < high and abs(ends - middle) < gap:
                found, gap = ends, abs(ends - middle)
            slot = r.placed[slot].next
        if found == np.inf:
            return high
        if fits_at(s, r, n, p, found):
            high = found
        else:
            low = found


@compiled
def refresh_earliest(s, r, p):
    """Brings the tree of kind p over (minus) the times up to date."""
    written, since = s.meta[WRITTEN], r.read[p]
    r.read[p] = written
    if since < 0 or written - since > len(s.log):
        r.earliest[p, :] = NEVER
        for n in range(len(s.nodes)):
            r.earliest[p, n] = -earliest_fit(s, r, n, p)
        for level in range(len(s.levels) - 2):
            for group in range((s.levels[level + 1] - s.levels[level]) // FAN):
                gather(r.earliest, s.ways, s.levels, p, level, group, False)
        return
    for entry in range(since, written):
        n = s.log[entry & (len(s.log) - 1)]
        value = -earliest_fit(s, r, n, p)
        if r.earliest[p, n] != value:
            update(r.earliest, s.ways, s.levels, p, n, value, False)


@compiled
def add_earliest(s, r, p, have, count):
    """Adds the ``count`` nodes that are first able to take kind p (lowest numbers first where equal) to the ``have``
    reserved ones, without those. Says how many there are now; -1 where there are not enough."""
    earliest, levels = r.earliest, s.levels
    for i in range(have):
        r.times[i] = earliest[p, r.nodes[i]]
        update(earliest, s.ways, levels, p, r.nodes[i], NEVER, False)
    total = have
    while total < have + count:
        k = levels[len(levels) - 2]
        top = earliest[p, k]
        if top == NEVER:
            break
        for level in range(len(levels) - 3, -1, -1):
            k = levels[level] + (k - levels[level + 1]) * FAN
            while earliest[p, k] != top:
                k += 1
        r.nodes[total], r.times[total] = k, top
        update(earliest, s.ways, levels, p, k, NEVER, False)
        total += 1
    for i in range(total):
        update(earliest, s.ways, levels, p, r.nodes[i], r.times[i], False)
    return total if total == have + count else -1


# ---- the reservation -------------------------------------------------------------------------------------------------


@compiled
def capacity_at(s, r, n, p, time, most):
    """How many pieces of kind p, up to ``most``, node n takes at once when what should end by then has ended."""
    if not fits_at(s, r, n, p, time):
        return 0
    node, piece = s.nodes[n], s.pieces[p]
    gpus, cpu, memory = free_at(s, r, n, time)
    if s.meta[DETAILED]:
        gpus = np.int64(0)
        for g in range(node.gpus):
            free = free_of_gpu_at(s, r, n, g, time)
            gpus += free // piece.milli if piece.gpus == 1 else free >= piece.milli
    if piece.milli < WHOLE and piece.gpus > 1:
        most = 1  # how many more depends on which GPUs they take
    return times(node, piece, most, gpus, cpu, memory)


@compiled
def reserve(s, r, c, rank, now):
    """Makes a reservation for the head of the queue, of class c."""
    if s.meta[TOPOLOGY] == REQUIRED and pieces_of(s.classes, c) > 1:
        total, shadow = find_in_a_rack(s, r, c)
    else:
        total, shadow = find_anywhere(s, r, c)
    shadow = max(shadow, now)
    r.about[NODES], r.about[SHADOW], r.about[CLASS_OF_HEAD], r.about[RANK_OF_HEAD] = total, shadow, c, rank
    for i in range(total):
        n = r.nodes[i]
        last = s.classes[c].rest >= 0 and i == total - 1
        piece = s.pieces[s.classes[c].rest if last else s.classes[c].piece]
        gpus, cpu, memory = free_at(s, r, n, shadow)
        s.nodes[n].reserved = 1
        s.nodes[n].spare_gpus = gpus - r.pieces[i] * piece.gpus if not s.meta[DETAILED] else -1  # -1: nothing at all
        s.nodes[n].spare_cpu = cpu - r.pieces[i] * piece.cpu
        s.nodes[n].spare_memory = memory - r.pieces[i] * piece.memory
        log_change(s, n)


@compiled
def cancel(s, r):
    for i in range(np.int64(r.about[NODES])):
        s.nodes[r.nodes[i]].reserved = 0
        log_change(s, r.nodes[i])
    r.about[CLASS_OF_HEAD] = r.about[RANK_OF_HEAD] = -1


@compiled
def find_anywhere(s, r, c):
    """Fills ``nodes`` and ``pieces`` for a job of class c: how many nodes, and the shadow time."""
    p, count, rest = s.classes[c].piece, s.classes[c].count, s.classes[c].rest
    refresh_earliest(s, r, p)
    if s.classes[c].shared and count > 1:
        return find_shared_nodes(s, r, p, count)
    total = add_earliest(s, r, p, 0, count)
    shadow = -np.inf
    for i in range(total):
        shadow = max(shadow, -r.times[i])
        r.pieces[i] = 1
    if rest >= 0 and total >= 0:
        refresh_earliest(s, r, rest)
        total = add_earliest(s, r, rest, total, 1)
        if total >= 0:
            shadow, r.pieces[total - 1] = max(shadow, -r.times[total - 1]), 1
    return total, shadow


@allocating
def ends_of_running(r):
    ends = np.empty(r.progress[RUNNING])
    for i in range(r.progress[RUNNING]):
        ends[i] = r.jobs[r.running[i].job].ends
    ends.sort()
    return ends


@allocating
def find_shared_nodes(s, r, p, count):
    """The same for pieces that may share a node: the first time at which all nodes together take them all."""
    ends = ends_of_running(r)
    low, high = -1, len(ends) - 1  # not all fit at ends[low]; at the last end they do, as in an empty cluster
    while high - low > 1:
        middle, able = (low + high) // 2, 0
        for n in range(len(s.nodes)):
            able += capacity_at(s, r, n, p, ends[middle], count)
        if able >= count:
            high = middle
        else:
            low = middle
    shadow = ends[high]
    order = np.argsort(-r.earliest[p, : len(s.nodes)], kind="mergesort")
    return fill_shared_nodes(s, r, p, count, order, shadow), shadow


@allocating
def fill_shared_nodes(s, r, p, count, order, shadow):
    total, rest = np.int64(0), count
    for n in order:
        able = min(rest, capacity_at(s, r, n, p, shadow, rest))
        if able > 0:
            r.nodes[total], r.pieces[total] = n, able
            total += 1
            rest -= able
        if rest == 0:
            break
    return total


# ---- in one rack, where the placement requires it --------------------------------------------------------------------


@allocating
def find_in_a_rack(s, r, c):
    """As :func:`find_anywhere`, in the rack that will first take all pieces."""
    p, count, rest = s.classes[c].piece, s.classes[c].count, s.classes[c].rest
    refresh_earliest(s, r, p)
    if rest >= 0:
        refresh_earliest(s, r, rest)
    ends = ends_of_running(r)
    shadow, rack, total = np.inf, 0, np.int64(-1)
    for again in range(2):  # the second time for the rack that was found
        begin = np.int64(0)
        for number in range(s.meta[RACKS]):
            end = np.int64(s.nodes[number].rack_end)
            if not again or number == rack:
                if s.classes[c].shared and count > 1:
                    total, time = rack_with_shared_nodes(s, r, ends, p, count, begin, end)
                else:
                    total, time = rack_with_a_node_each(s, r, p, count, rest, begin, end)
                if time < shadow:
                    shadow, rack = time, number
                if again:
                    return total, min(time, ends[-1])
            begin = end
    return total, shadow


@allocating
def by_earliest(s, r, p, begin, end):
    """The nodes of a rack in the order in which they will be able to take a piece of kind p."""
    members = np.empty(end - begin, np.int64)
    when = np.empty(end - begin)
    for k in range(begin, end):
        members[k - begin] = s.nodes[k].member
        when[k - begin] = -r.earliest[p, s.nodes[k].member]
    return members[np.argsort(when, kind="mergesort")]


@allocating
def rack_with_a_node_each(s, r, p, count, rest, begin, end):
    """A node for each piece: how many, and the time at which all of them are able; inf never."""
    order = by_earliest(s, r, p, begin, end)
    total, shadow = np.int64(count), -np.inf
    if count > len(order) or r.earliest[p, order[count - 1]] == NEVER:
        return total, np.inf
    for i in range(count):
        r.nodes[i], r.pieces[i] = order[i], 1
        shadow = max(shadow, -r.earliest[p, order[i]])
    if rest < 0:
        return total, shadow
    chosen, top = np.int64(-1), NEVER
    for k in range(begin, end):
        n, taken = np.int64(s.nodes[k].member), False
        for i in range(count):
            taken |= r.nodes[i] == n
        if not taken and r.earliest[rest, n] > top:
            chosen, top = n, r.earliest[rest, n]
    r.nodes[total], r.pieces[total] = chosen, 1
    return total + 1, max(shadow, -top)


@compiled
def rack_able_at(s, r, p, count, begin, end, time):
    able = 0
    for k in range(begin, end):
        able += capacity_at(s, r, s.nodes[k].member, p, time, count)
    return able >= count


@allocating
def rack_with_shared_nodes(s, r, ends, p, count, begin, end):
    """The same for pieces that may share a node."""
    low, high = -1, len(ends) - 1
    ever = rack_able_at(s, r, p, count, begin, end, ends[high])
    while ever and high - low > 1:
        middle = (low + high) // 2
        if rack_able_at(s, r, p, count, begin, end, ends[middle]):
            high = middle
        else:
            low = middle
    total = fill_shared_nodes(s, r, p, count, by_earliest(s, r, p, begin, end), ends[high])
    return total, ends[high] if ever else np.inf
