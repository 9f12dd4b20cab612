"""The event loop where tenants count: orders among tenants, and quotas.

Everything is as in run.py, but for who comes next: the jobs of a class are kept by tenant, in *lines* of one class and one
tenant. Of the heads of all lines first come those for whom the tenant borrows nothing; of these the one whose tenant has the
least share; of these the one of the lowest rank. What fits is known by class as there; what a quota admits is seen from what
the line's tenant, and all tenants, hold.

*Strict*: each tenant's head waits, and nobody of that tenant passes it. A quota holds only its tenant; a head that the quota
admits and that finds no nodes holds everybody.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine import prepare
from weft.cluster.engine.allocate import give_back, place
from weft.cluster.engine.compiled import compiled, switch
from weft.cluster.engine.reasons import QUOTA, begin_waiting, end_waiting, settle, why
from weft.cluster.engine.run import (
    ARRIVED,
    COMPLETED,
    NOBODY,
    RUNNING,
    next_moment,
    pop_completion,
    pop_rank,
    push_completion,
    push_rank,
)
from weft.cluster.model import WHOLE, Cluster, Jobs
from weft.cluster.order import Order
from weft.cluster.orders import ORDERS
from weft.cluster.quota import Limits

# What a tenant's jobs hold, and its share by that; thousandths of GPUs that are its own (`nominal`), and that its quota admits
# at most. `head`: the lowest rank of its waiting jobs.
TENANT = np.dtype(
    [(name, "i8") for name in ("gpus", "cpu", "memory", "nominal", "most", "head")]
    + [("weight", "f8"), ("share", "f8")]
)
# `cls`: the class; `gpus`, `cpu`, `memory`: what one of its jobs asks. `begin`, `size`: its waiting jobs in the heap; `active`:
# its place among the lines with waiting jobs. `reason`, `since`: as of a class.
LINE = np.dtype(
    [(name, "i8") for name in ("cls", "tenant", "gpus", "cpu", "memory", "begin", "size", "active", "reason")]
    + [("since", "f8")]
)
TOTAL = np.dtype([(name, "i8") for name in ("gpus", "cpu", "memory")])
# Counters: GPUs that all tenants hold and may hold; lines with waiting jobs; moments so far, and the last one that changed
# what is free.
HELD, TOGETHER, ACTIVE, MOMENT, CHANGED, COUNTERS = range(6)

SHARES = [each for each in ORDERS.values() if each.share]
share_of = switch("share_of", ("tenant", "cluster"), [each.share for each in SHARES if each.share])


@compiled
def admitted(tenants, lines, counters, k):
    """Whether the quota admits one more job of line k."""
    gpus, t = lines[k].gpus, lines[k].tenant
    return gpus == 0 or (tenants[t].gpus + gpus <= tenants[t].most and counters[HELD] + gpus <= counters[TOGETHER])


@compiled
def charge(tenants, lines, counters, cluster, code, k, sign):
    """A job of line k starts (sign 1) or completes (-1)."""
    t = lines[k].tenant
    tenants[t].gpus += sign * lines[k].gpus
    tenants[t].cpu += sign * lines[k].cpu
    tenants[t].memory += sign * lines[k].memory
    counters[HELD] += sign * lines[k].gpus
    if code >= 0:
        tenants[t].share = share_of(code, tenants[t], cluster[0])


@compiled
def activate(lines, active, counters, k):
    lines[k].active = counters[ACTIVE]
    active[counters[ACTIVE]] = k
    counters[ACTIVE] += 1


@compiled
def retire(lines, active, counters, k):
    """Line k has no waiting jobs any more; the last active one takes its place."""
    counters[ACTIVE] -= 1
    last = active[counters[ACTIVE]]
    active[lines[k].active] = last
    lines[last].active = lines[k].active


@compiled
def next_line(tenants, lines, active, counters, classes, heap, strict):
    """The line whose head comes next, of those that may start; -1: nobody. Strictly, of those that are their tenant's head."""
    if strict:
        for i in range(counters[ACTIVE]):
            tenants[lines[active[i]].tenant].head = NOBODY
        for i in range(counters[ACTIVE]):
            k = active[i]
            t, rank = lines[k].tenant, heap[lines[k].begin]
            tenants[t].head = min(tenants[t].head, rank)
    found, borrows, share, head = -1, True, np.inf, NOBODY
    for i in range(counters[ACTIVE]):
        k = active[i]
        t, rank = lines[k].tenant, heap[lines[k].begin]
        more = lines[k].gpus > 0 and tenants[t].gpus + lines[k].gpus > tenants[t].nominal
        if more != borrows:
            if more:
                continue
        elif tenants[t].share > share or (tenants[t].share == share and rank > head):
            continue
        if (rank != tenants[t].head) if strict else classes[lines[k].cls].blocked:
            continue
        if admitted(tenants, lines, counters, k):
            found, borrows, share, head = k, more, tenants[t].share, rank
    return found


@compiled
def advance(
    jobs, of_rank, heap, running, progress, where, on, nodes, pieces, best, ways, levels, log, meta, context, room, classes,
    total, waits, tenants, lines, active, looked, counters, cluster, code, strict, until, most,
):  # fmt: skip
    """Runs up to ``most`` moments, none after ``until``; says whether anything is left to happen.

    ``total`` [L, reasons], ``waits`` [J, reasons]: as in run.py, by line. ``looked`` [C]: the moment at which what a class
    waits for was last found out. ``code``: which of SHARES; -1: all tenants have the same, and the queue's order alone counts.
    """
    for _ in range(most):
        now = next_moment(jobs, running, progress)
        if now == np.inf or now > until:
            return False
        counters[MOMENT] += 1
        while progress[RUNNING] and running[0].time == now:
            counters[CHANGED] = counters[MOMENT]
            job = running[0].job
            pop_completion(running, progress)
            give_back(nodes, pieces, log, meta, room, classes, jobs[job].cls, where, on, jobs[job].slot)
            charge(tenants, lines, counters, cluster, code, jobs[job].line, -1)
            progress[COMPLETED] += 1
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, k = progress[ARRIVED], jobs[progress[ARRIVED]].line
            begin_waiting(lines, total, waits, k, job, now)
            if lines[k].size == 0:
                activate(lines, active, counters, k)
            push_rank(heap, lines, k, jobs[job].rank)
            progress[ARRIVED] += 1
        while True:
            k = next_line(tenants, lines, active, counters, classes, heap, strict)
            if k < 0 or classes[lines[k].cls].blocked:
                break
            c, job = lines[k].cls, of_rank[heap[lines[k].begin]]
            slot = jobs[job].slot
            if place(nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot):
                pop_rank(heap, lines, k)
                end_waiting(lines, total, waits, k, job, now)
                if lines[k].size == 0:
                    lines[k].reason = -1
                    retire(lines, active, counters, k)
                charge(tenants, lines, counters, cluster, code, k, 1)
                jobs[job].start = now
                counters[CHANGED] = counters[MOMENT]
                push_completion(running, progress, now + jobs[job].duration, job)
            else:
                classes[c].blocked = True
        for i in range(counters[ACTIVE]):
            k = active[i]
            c, reason = lines[k].cls, np.int64(QUOTA)
            if admitted(tenants, lines, counters, k):
                if looked[c] < counters[CHANGED] or looked[c] < 0:
                    looked[c] = counters[MOMENT]
                    slot = jobs[of_rank[heap[lines[k].begin]]].slot
                    classes[c].reason = why(
                        nodes, pieces, best, ways, levels, log, meta, context, room, classes, c, where, on, slot
                    )
                reason = classes[c].reason
            if reason != lines[k].reason:
                settle(lines, total, k, now)
                lines[k].reason = reason
    return True


def tenanted(
    tables: prepare.Tables, jobs: Jobs, rows: NDArray[np.int64], cluster: Cluster, order: Order, strict: bool,
    weights: NDArray[np.float64], limits: Limits,
) -> prepare.Advance:  # fmt: skip
    """The loop where tenants count: ``advance(most)``. The tables' jobs are ``rows`` of ``jobs``."""
    t, (nodes, best, ways, levels, log, meta, context, room) = tables, tables.state
    tenant = jobs.tenant[rows]
    pair, first, line = np.unique(
        t.jobs["cls"].astype(np.int64) * len(weights) + tenant, return_index=True, return_inverse=True
    )
    t.jobs["line"] = line
    lines, tenants = np.zeros(len(pair), LINE), np.zeros(len(weights), TENANT)
    lines["cls"], lines["tenant"] = pair // len(weights), pair % len(weights)
    lines["gpus"] = (jobs.gpus * jobs.milli)[rows[first]]
    lines["cpu"], lines["memory"] = jobs.cpu[rows[first]], jobs.memory[rows[first]]
    count = np.bincount(line, minlength=len(pair))
    lines["begin"], lines["reason"] = np.cumsum(count) - count, -1
    tenants["weight"], tenants["nominal"], tenants["most"] = weights, limits.nominal, limits.most
    counters = np.zeros(COUNTERS, np.int64)
    counters[TOGETHER] = limits.together
    whole = np.array([totals(cluster)], TOTAL)
    heap, active, looked = (
        np.zeros(len(rows), np.int32),
        np.zeros(len(lines), np.int64),
        np.full(len(t.classes), -1, np.int64),
    )
    t.total = np.zeros((len(lines), t.total.shape[1]))
    code = SHARES.index(order) if order.share else -1
    if order.share:
        tenants["share"] = [order.share(each, whole.view(np.recarray)[0]) for each in tenants.view(np.recarray)]
    return lambda most: advance(
        t.jobs, t.of_rank, heap, t.running, t.progress, t.where, t.on, nodes, t.pieces, best, ways, levels, log, meta, context,
        room, t.classes, t.total, t.waits, tenants, lines, active, looked, counters, whole, code, strict, t.until, most,
    )  # fmt: skip


def totals(cluster: Cluster) -> tuple[int, int, int]:
    """All GPUs (thousandths), cores (thousandths) and memory (MiB); 0 of what is not known of every node."""
    known = [0 if (column < 0).any() else int(column.sum()) for column in (cluster.cpu, cluster.memory)]
    return cluster.total_gpus * WHOLE, known[0], known[1]
