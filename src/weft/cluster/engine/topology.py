"""Which rack a job's pieces go to, compiled (``weft.cluster.reference.placing`` is the plain form).

Only what is free in each rack and domain is tracked (``rack_free`` and ``domain_free`` of a node's row): racks with
fewer free GPUs than requested, or no fewer than the best so far, are skipped, the others searched.
"""

import numpy as np

from weft.cluster.engine.compiled import allocating, compiled
from weft.cluster.engine.index import score_of
from weft.cluster.engine.node import DETAILED, HIGHEST, RACKS, RANDOM, TIES, TOPOLOGY, below, fits, times
from weft.cluster.engine.tree import NEVER
from weft.cluster.model import WHOLE
from weft.cluster.placement import REQUIRED


@compiled
def takes(node, piece, most, detailed):
    """How many such pieces, up to ``most``, a node takes one after the other."""
    if most == 0 or not fits(node, piece):
        return 0
    gpus = np.int64(node.free_gpus)
    if detailed and piece.milli < WHOLE and piece.gpus > 0:
        gpus = takes_shares(node, piece) * piece.gpus
    most = times(node, piece, most, gpus, node.free_cpu, node.free_memory)
    if piece.beyond_shadow and node.reserved:
        most = times(node, piece, most, node.spare_gpus, node.spare_cpu, node.spare_memory)
    return most


@allocating
def takes_shares(node, piece):
    """By its GPUs alone, of which several shares take those with the most free."""
    free, count = node.milli.copy(), 0
    while True:
        taken = 0
        for _ in range(piece.gpus):
            found = -1
            for g in range(node.gpus):
                if not (taken >> g) & 1 and free[g] >= piece.milli and (found < 0 or free[g] > free[found]):
                    found = g
            if found < 0:
                return count
            taken |= 1 << found
        for g in range(node.gpus):
            if (taken >> g) & 1:
                free[g] -= piece.milli
        count += 1


@compiled
def takes_in(s, begin, end, p, count):
    """How many of ``count`` pieces of kind p these nodes take."""
    able = 0
    for k in range(begin, end):
        able += takes(s.nodes[s.nodes[k].member], s.pieces[p], count - able, s.meta[DETAILED])
        if able == count:
            break
    return able


@compiled
def takes_all(s, begin, end, p, count, rest):
    """Whether these nodes take all of a job: a remainder needs a node that takes none of the whole pieces, each of
    which fills one."""
    if takes_in(s, begin, end, p, count) < count:
        return False
    able = 0
    for k in range(begin, end if rest >= 0 else begin):
        able += fits(s.nodes[s.nodes[k].member], s.pieces[rest])
        if able > count:
            break
    return rest < 0 or able > count


@compiled
def rack_takes_freed(s, p, count, rest, begin, end):
    """Whether a rack of the nodes ``where[begin:end]``, on which something was freed, takes all of a job."""
    last = -1
    for i in range(begin, end):
        r = s.nodes[s.where[i]].rack
        if r != last:
            first = s.nodes[r - 1].rack_end if r else 0
            if takes_all(s, first, s.nodes[r].rack_end, p, count, rest):
                return True
        last = r
    return False


@compiled
def nearest(s, p, count, rest):
    """Where the next pieces of a job go, of which ``count`` of kind p and a remainder (-1: none) are left: where those
    nodes begin and end, in the order of racks, and how many pieces they are to take, 0 where they fit nowhere."""
    nodes, pieces = s.nodes, s.pieces
    requested = count * pieces[p].gpus * pieces[p].milli
    if rest >= 0:
        requested += pieces[rest].gpus * pieces[rest].milli
    together, least, found_begin, found_end = False, np.int64(0), np.int64(-1), np.int64(-1)
    begin = np.int64(0)
    for r in range(s.meta[RACKS]):
        end = np.int64(nodes[r].rack_end)
        free = nodes[r].rack_free
        if free >= requested and not (together and free >= least):
            domain_begin, domain_end, least_of_domain = np.int64(-1), np.int64(-1), np.int64(0)
            at = begin
            while at < end:
                d = nodes[nodes[at].member].domain
                of_domain, until = nodes[d].domain_free, np.int64(nodes[d].domain_end)
                fuller = of_domain >= requested and (domain_begin < 0 or of_domain < least_of_domain)
                if fuller and takes_all(s, at, until, p, count, rest):
                    domain_begin, domain_end, least_of_domain = at, until, of_domain
                at = until
            if domain_begin >= 0:
                together, least, found_begin, found_end = True, free, domain_begin, domain_end
            elif not together and (found_begin < 0 or free < least) and takes_all(s, begin, end, p, count, rest):
                least, found_begin, found_end = free, begin, end
        begin = end
    if found_begin >= 0:
        return found_begin, found_end, count + (rest >= 0)
    if s.meta[TOPOLOGY] == REQUIRED:
        return 0, 0, 0
    return rack_for_most(s, p, count)


@compiled
def rack_for_most(s, p, count):
    """The rack that takes the most of ``count`` pieces."""
    most, found_begin, found_end, begin = 0, np.int64(0), np.int64(0), np.int64(0)
    for r in range(s.meta[RACKS]):
        end = np.int64(s.nodes[r].rack_end)
        able = takes_in(s, begin, end, p, count)
        if able > most:
            most, found_begin, found_end = able, begin, end
        begin = end
    return found_begin, found_end, most


@compiled
def fullest_with_best_score(s, p):
    """Where the only piece of a job goes, whose tree is up to date: the fullest domain in the fullest rack that has one
    of the best nodes for it."""
    nodes = s.nodes
    top = s.best[p, s.levels[len(s.levels) - 2]]
    least, found_begin, found_end, begin = np.int64(0), np.int64(-1), np.int64(-1), np.int64(0)
    for r in range(s.meta[RACKS]):
        end, free = np.int64(nodes[r].rack_end), nodes[r].rack_free
        at = begin if found_begin < 0 or free < least else end
        domain_begin, domain_end, least_of_domain = np.int64(-1), np.int64(-1), np.int64(0)
        while at < end:
            d = nodes[nodes[at].member].domain
            of_domain, until = nodes[d].domain_free, np.int64(nodes[d].domain_end)
            if domain_begin < 0 or of_domain < least_of_domain:
                for k in range(at, until):
                    if s.best[p, nodes[k].member] == top:
                        domain_begin, domain_end, least_of_domain = at, until, of_domain
                        break
            at = until
        if domain_begin >= 0:
            least, found_begin, found_end = free, domain_begin, domain_end
        begin = end
    return found_begin, found_end, 1


@compiled
def choose_among(s, p, begin, end):
    """Of these nodes the one with the highest score for a piece of kind p, ties by the rule; -1 where it fits none."""
    top, chosen, equal = NEVER, np.int64(-1), 0
    for k in range(begin, end):
        n = s.nodes[k].member
        value = score_of(s, n, p)
        if value > top or (value == top and value > NEVER and s.meta[TIES] == HIGHEST):
            equal = 1 if value > top else equal + 1
            top, chosen = value, np.int64(n)
        elif value == top:
            equal += 1
    if s.meta[TIES] != RANDOM or chosen < 0:
        return chosen
    skip = below(s.meta, equal)
    for k in range(begin, end):
        n = s.nodes[k].member
        if score_of(s, n, p) == top:
            if skip == 0:
                return np.int64(n)
            skip -= 1
    return np.int64(-1)
