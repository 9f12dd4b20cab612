"""What is free of a node throughout two moments, and when nodes will be able to take a job, by the plan of what stays there.

For each number of GPUs that jobs ask, a node's first *hole* is kept: from when until when so many are free. A node is looked
at only where its hole does not show that it is able too late: mostly a comparison of two numbers a node.
"""

from __future__ import annotations

import numpy as np

from weft.cluster.engine.compiled import compiled
from weft.cluster.engine.node import HIGHEST, PLACEMENT, RANDOM, TIES, below, score, times
from weft.cluster.engine.promise import PLACE, settle_on
from weft.cluster.engine.tree import NEVER

# A place of a job on a node, and when it begins and ends as planned: beside each other, since whole lists are read.
STAY = np.dtype([*PLACE.descr, ("begins", "f8"), ("ends", "f8")])
# `holes` [numbers, N, 2]: when the first hole of a node opens and closes; NEVER where it has to be looked for again, also
# when it has closed. `asked` [numbers]: so many GPUs; a piece's is its `level`. While a plan only gets fuller, and jobs stay
# beyond their estimates, a hole that is written down is still right about what is *not* free.


@compiled
def ends_of(stay, now):
    """When it is expected to end: who runs beyond its estimate may stay for ever."""
    return stay.ends if stay.ends > now else np.inf


@compiled
def stay_on(first, places, holes, where, slot, count, job, piece, rest, begins, ends):
    """Enters a job that starts or is planned in the lists of its nodes."""
    settle_on(first, places, where, slot, count, job, piece, rest)
    for i in range(slot, slot + count):
        places[i].begins, places[i].ends = begins, ends
    forget_holes(holes, where, slot, count)


@compiled
def least(nodes, pieces, first, places, n, begin, end, now):
    """What is free of node n throughout two moments: GPUs, cores, memory."""
    gpus, cpu, memory = np.int64(1 << 60), np.int64(1 << 60), np.int64(1 << 60)
    at = first[n]
    moment = begin
    while True:  # at the first moment, and at each later one at which something begins
        g, c, m = np.int64(nodes[n].gpus), nodes[n].cpu, nodes[n].memory
        slot = first[n]
        while slot >= 0:
            if places[slot].begins <= moment < ends_of(places[slot], now):
                g -= pieces[places[slot].piece].gpus
                c -= pieces[places[slot].piece].cpu
                m -= pieces[places[slot].piece].memory
            slot = places[slot].next
        gpus, cpu, memory = min(gpus, g), min(cpu, c), min(memory, m)
        while at >= 0 and not begin < places[at].begins < end:
            at = places[at].next
        if at < 0:
            return gpus, cpu, memory
        moment = places[at].begins
        at = places[at].next


@compiled
def room_for(nodes, pieces, first, places, n, p, begin, end, now):
    """How many pieces of kind p node n takes throughout two moments."""
    node, piece = nodes[n], pieces[p]
    if not (piece.types >> node.gpu_type) & 1 or (piece.gpu_memory > 0 and 0 <= node.gpu_memory < piece.gpu_memory):
        return 0
    gpus, cpu, memory = least(nodes, pieces, first, places, n, begin, end, now)
    return max(times(node, piece, np.int64(1 << 30), gpus, cpu, memory), 0)


@compiled
def soonest_on(nodes, pieces, first, places, n, p, since, bound, limit, length, now):
    """The earliest moment from ``since`` on, and before ``limit``, at which node n takes a piece of kind p for so long: the
    limit where there is none. It is known not to be before ``bound``."""
    if bound <= since and room_for(nodes, pieces, first, places, n, p, since, since + length, now) > 0:
        return since
    found = limit
    slot = first[n]
    while slot >= 0:
        ends = ends_of(places[slot], now)
        if (
            since < ends < found
            and ends >= bound
            and room_for(nodes, pieces, first, places, n, p, ends, ends + length, now) > 0
        ):  # fmt: skip
            found = ends
        slot = places[slot].next
    return found


@compiled
def look(nodes, first, places, pieces, holes, asked, n, now):
    """Writes down the first hole of node n for each number of GPUs that is asked."""
    for level in range(len(asked)):
        opens, closes = np.inf, np.inf
        if free_at(nodes, first, places, pieces, n, now, now) >= asked[level]:
            opens = now
        else:
            slot = first[n]
            while slot >= 0:
                ends = ends_of(places[slot], now)
                if (
                    now < ends < opens
                    and free_at(nodes, first, places, pieces, n, ends, now) >= asked[level]
                ):  # fmt: skip
                    opens = ends
                slot = places[slot].next
        slot = first[n] if opens < np.inf else -1
        while slot >= 0:
            begins = places[slot].begins
            if (
                opens < begins < closes
                and free_at(nodes, first, places, pieces, n, begins, now) < asked[level]
            ):  # fmt: skip
                closes = begins
            slot = places[slot].next
        holes[level, n, 0], holes[level, n, 1] = opens, closes


@compiled
def free_at(nodes, first, places, pieces, n, moment, now):
    """How many GPUs of node n are free at a moment."""
    gpus = np.int64(nodes[n].gpus)
    slot = first[n]
    while slot >= 0:
        if places[slot].begins <= moment < ends_of(places[slot], now):
            gpus -= pieces[places[slot].piece].gpus
        slot = places[slot].next
    return gpus


@compiled
def not_before(holes, level, n, since, length):
    """No earlier than that, from ``since`` on, node n takes so many GPUs for so long."""
    opens, closes = max(holes[level, n, 0], since), holes[level, n, 1]
    return opens if opens + length <= closes else max(opens, closes)


@compiled
def forget_holes(holes, where, slot, count):
    """The nodes ``where[slot:]`` have changed."""
    for i in range(slot, slot + count):
        holes[:, where[i], :] = NEVER


@compiled
def enough_at(nodes, pieces, first, places, holes, p, count, rest, shared, begin, length, now):
    """Whether all pieces of a job fit throughout two moments."""
    able = able_rest = 0
    end = begin + length
    for n in range(len(nodes)):
        if not_before(holes, pieces[p].level, n, begin, length) <= begin:
            fits = room_for(nodes, pieces, first, places, n, p, begin, end, now)
            able += fits if shared else min(fits, 1)
        if rest >= 0 and not_before(holes, pieces[rest].level, n, begin, length) <= begin:
            able_rest += min(room_for(nodes, pieces, first, places, n, rest, begin, end, now), 1)
    return able >= count and (rest < 0 or able_rest > count)


@compiled
def least_moment(nodes, pieces, first, places, holes, asked, ready, p, count, since, length, now):
    """When the ``count``-th node is first able to take a piece of kind p for so long, from ``since`` on; inf never."""
    if count > len(nodes):
        return np.inf
    found, level = 0, pieces[p].level  # `ready`: the earliest of these moments so far, in order
    for n in range(len(nodes)):
        if holes[level, n, 1] <= now:
            look(nodes, first, places, pieces, holes, asked, n, now)
        limit = ready[count - 1] if found == count else np.inf
        bound = not_before(holes, level, n, since, length)
        if bound >= limit:
            continue
        moment = soonest_on(nodes, pieces, first, places, n, p, since, bound, limit, length, now)
        if moment >= limit:
            continue
        k = found if found < count else count - 1
        found = min(found + 1, count)
        while k > 0 and ready[k - 1] > moment:
            ready[k] = ready[k - 1]
            k -= 1
        ready[k] = moment
    return ready[count - 1] if found == count else np.inf


@compiled
def moment_for(nodes, pieces, first, places, holes, asked, ready, p, count, rest, shared, length, now):
    """The earliest moment from now on at which all pieces fit for so long; ``ready`` is room for a number a node."""
    moment = now
    while True:
        # No earlier than when so many nodes are able to take one.
        found = least_moment(
            nodes, pieces, first, places, holes, asked, ready, p, 1 if shared else count, moment, length, now
        )
        if found == np.inf or (count == 1 and rest < 0):
            return found
        if enough_at(nodes, pieces, first, places, holes, p, count, rest, shared, found, length, now):
            return found
        if found > moment:
            moment = found
            continue
        later = np.inf  # the next end of anything anywhere
        for n in range(len(nodes)):
            slot = first[n]
            while slot >= 0:
                ends = ends_of(places[slot], now)
                if moment < ends < later:
                    later = ends
                slot = places[slot].next
        if later == np.inf:
            return np.inf
        moment = later


@compiled
def value_of(nodes, pieces, meta, context, first, places, view, n, p, begin, end, now):
    """What the placement thinks of node n for a piece of kind p, by the least that is free throughout two moments: NEVER where
    it does not fit."""
    node, piece = nodes[n], pieces[p]
    if not (piece.types >> node.gpu_type) & 1 or (piece.gpu_memory > 0 and 0 <= node.gpu_memory < piece.gpu_memory):
        return NEVER
    gpus, cpu, memory = least(nodes, pieces, first, places, n, begin, end, now)
    if gpus < piece.gpus or (node.cpu >= 0 and cpu < piece.cpu) or (node.memory >= 0 and memory < piece.memory):
        return NEVER
    view[0] = node
    view[0].free_gpus, view[0].free_cpu, view[0].free_memory = gpus, cpu, memory
    return score(meta[PLACEMENT], piece, view[0], context)


@compiled
def able_at(nodes, pieces, meta, context, first, places, holes, able, values, view, p, begin, length, now):
    """Writes the nodes that take a piece of kind p from a moment on for so long to ``able``, and to ``values`` what the
    placement thinks of them: how many."""
    count, level = 0, pieces[p].level
    for n in range(len(nodes)):
        if not_before(holes, level, n, begin, length) <= begin:
            value = value_of(nodes, pieces, meta, context, first, places, view, n, p, begin, begin + length, now)
            if value > NEVER:
                able[count], values[count] = n, value
                count += 1
    return count


@compiled
def best_of(values, count, meta):
    """Which of these is the highest, ties by the rule; -1 where all are NEVER."""
    top, chosen, equal = NEVER, np.int64(-1), 0
    for k in range(count):
        if values[k] > top or (values[k] == top and top > NEVER and meta[TIES] == HIGHEST):
            equal = 1 if values[k] > top else equal + 1
            top, chosen = values[k], np.int64(k)
        elif values[k] == top:
            equal += 1
    if meta[TIES] != RANDOM or chosen < 0:
        return chosen
    left = below(meta, equal)
    for k in range(count):
        if values[k] == top:
            if left == 0:
                return np.int64(k)
            left -= 1
    return chosen
