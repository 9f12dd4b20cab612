"""The event loop with tenants: orders among tenants, and quotas.

As in simple_loop.py, except for which job comes next: the jobs of a class are kept by tenant, in *lines* of one class
and one tenant. Of the heads of all lines those come first for which the tenant borrows nothing; of these the one whose
tenant has the least share; of these the one of the lowest rank. What fits is known by class; what a quota admits
follows from what the line's tenant, and all tenants, hold.

*Strict*: each tenant's head blocks that tenant's other jobs. For a head that waits for quota, what it lacks is kept of the
cohort's, as in Kueue's StrictFIFO; a head that the quota admits and that fits on no nodes blocks all jobs.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine.allocate import give_back, place
from weft.cluster.engine.compiled import NO_KEY, address_of, entry, inlined, switch
from weft.cluster.engine.queues import (
    ARRIVED,
    COMPLETED,
    NO_RANK,
    RUNNING,
    next_event,
    pop_completion,
    pop_rank,
    push_completion,
    push_rank,
)
from weft.cluster.engine.tables import PLAIN, Advance, Tables
from weft.cluster.engine.wait_reasons import QUOTA, begin_waiting, end_waiting, set_reason, why
from weft.cluster.model import WHOLE, Cluster, Jobs
from weft.cluster.order import Order
from weft.cluster.orders import ORDERS
from weft.cluster.quota import Limits

# What a tenant's jobs hold, and its share by that. `head`: the lowest rank of its waiting jobs.
TENANT = np.dtype([(name, "i8") for name in ("gpus", "cpu", "memory", "head")] + [("weight", "f8"), ("share", "f8")])
# `cls`: the class; `gpus`, `cpu`, `memory`: what one of its jobs requests. `begin`, `size`: its waiting jobs in the
# heap; `active`: its position among the lines with waiting jobs. `reason`, `since`: as of a class.
LINE = np.dtype(
    [(name, "i8") for name in ("cls", "tenant", "gpus", "cpu", "memory", "begin", "size", "active", "reason")]
    + [("since", "f8")]
)
# Of a resource what a tenant holds, and of quota.Limits its own; of the pool of what all lend its size and what is used.
# `kept`: of the pool, for the tenant's waiting head, and for all.
ACCOUNT = np.dtype([(name, "i8") for name in ("held", "nominal", "reserved", "limit", "kept")])
POOL = np.dtype([(name, "i8") for name in ("size", "used", "kept")])
TOTAL = np.dtype([(name, "i8") for name in ("gpus", "cpu", "memory")])
# Counters: lines with waiting jobs; event times so far, and the last one that changed what is free.
ACTIVE, EVENT, CHANGED, COUNTERS = range(4)

SHARES = [each for each in ORDERS.values() if each.share]
share_of = switch("share_of", ("tenant", "cluster"), [each.share for each in SHARES if each.share])


class Queue(NamedTuple):
    jobs: Any  # [J] queues.JOB
    running: Any  # the heap of completions
    progress: Any  # counters
    total: Any  # [L, reasons]: seconds that a line has waited for each reason
    waits: Any  # [J, reasons]: the same of a job
    of_rank: Any  # the job of each rank
    heap: Any  # the ranks of waiting jobs, a heap for each line
    tenants: Any  # [T] TENANT
    lines: Any  # [L] LINE
    active: Any  # lines with waiting jobs
    determined: Any  # [C]: the event at which the wait reason of a class was last determined
    counters: Any  # [COUNTERS]
    cluster: Any  # [1] TOTAL
    requested: Any  # [L, R]: what a job of each line requests of the resources that have quotas
    accounts: Any  # [T, R] ACCOUNT
    pools: Any  # [R] POOL


@inlined
def in_pool(account, more):
    """What a tenant, with so much more, takes of the pool of what is lent: all beyond what it does not lend."""
    return max(account.held + more - account.reserved, 0)


@inlined
def admitted_of(account, pool, amount, beside_kept):
    """Whether a resource's quota admits a job that requests so much, beside what is kept for other tenants' heads or not."""
    more = in_pool(account, amount) - in_pool(account, 0)
    others = pool.kept - account.kept if beside_kept else 0
    within = account.held + amount <= account.limit and (more == 0 or pool.used + others + more <= pool.size)
    return amount == 0 or within


@inlined
def admitted(q, k, beside_kept):
    found, t = True, q.lines[k].tenant
    for r in range(len(q.pools)):
        found &= admitted_of(q.accounts[t, r], q.pools[r], q.requested[k, r], beside_kept)
    return found


@inlined
def borrows(q, k):
    found, t = False, q.lines[k].tenant
    for r in range(len(q.pools)):
        amount = q.requested[k, r]
        found |= amount > 0 and q.accounts[t, r].held + amount > q.accounts[t, r].nominal
    return found


@inlined
def before(q, a, b):
    """Whether the head of line a comes before that of line b."""
    first, second = borrows(q, a), borrows(q, b)
    if first != second:
        return second
    share, other = q.tenants[q.lines[a].tenant].share, q.tenants[q.lines[b].tenant].share
    return share < other or (share == other and q.heap[q.lines[a].begin] < q.heap[q.lines[b].begin])


@inlined
def keep(q, k):
    """The head of line k waits for quota. Kept for it is what its tenant lacks: within its nominal quota, or with what that
    may borrow, if the head would borrow. A head that requests more than the nominal quota of what it lacks keeps nothing."""
    accounts, t = q.accounts, q.lines[k].tenant
    for r in range(len(q.pools)):
        amount = q.requested[k, r]
        if amount > accounts[t, r].nominal and not admitted_of(accounts[t, r], q.pools[r], amount, False):
            return
    borrowing = borrows(q, k)
    for r in range(len(q.pools)):
        most = accounts[t, r].limit if borrowing else accounts[t, r].nominal
        amount = max(min(q.requested[k, r], most - accounts[t, r].held), 0)
        accounts[t, r].kept = in_pool(accounts[t, r], amount) - in_pool(accounts[t, r], 0)
        q.pools[r].kept += accounts[t, r].kept


@inlined
def charge(q, code, k, sign):
    """A job of line k starts (sign 1) or completes (-1)."""
    t, lines, tenants = q.lines[k].tenant, q.lines, q.tenants
    tenants[t].gpus += sign * lines[k].gpus
    tenants[t].cpu += sign * lines[k].cpu
    tenants[t].memory += sign * lines[k].memory
    for r in range(len(q.pools)):
        before_it = in_pool(q.accounts[t, r], 0)
        q.accounts[t, r].held += sign * q.requested[k, r]
        q.pools[r].used += in_pool(q.accounts[t, r], 0) - before_it
    if code >= 0:
        tenants[t].share = share_of(code, tenants[t], q.cluster[0])


@inlined
def activate(q, k):
    q.lines[k].active = q.counters[ACTIVE]
    q.active[q.counters[ACTIVE]] = k
    q.counters[ACTIVE] += 1


@inlined
def deactivate(q, k):
    """Line k has no waiting jobs any more; the last active one takes its position."""
    q.counters[ACTIVE] -= 1
    last = q.active[q.counters[ACTIVE]]
    q.active[q.lines[k].active] = last
    q.lines[last].active = q.lines[k].active


@inlined
def next_line(q, classes, strict):
    """The line whose head comes next, of those that may start; -1: none. Strict: of those that are their tenant's
    head, beside what is kept for heads before it."""
    lines, tenants, count = q.lines, q.tenants, q.counters[ACTIVE]
    if strict:
        for r in range(len(q.pools)):
            q.pools[r].kept = 0
        for t in range(len(tenants)):
            tenants[t].head = NO_RANK
            for r in range(len(q.pools)):
                q.accounts[t, r].kept = 0
        for i in range(count):
            k = q.active[i]
            t, rank = lines[k].tenant, q.heap[lines[k].begin]
            tenants[t].head = min(tenants[t].head, rank)
    last = -1
    while True:
        found = -1
        for i in range(count):
            k = q.active[i]
            if strict:
                if q.heap[lines[k].begin] != tenants[lines[k].tenant].head or (last >= 0 and not before(q, last, k)):
                    continue
            elif classes[lines[k].cls].blocked:
                continue
            if (found < 0 or before(q, k, found)) and admitted(q, k, False):
                found = k
        if found < 0 or not strict:
            return found
        for i in range(count):  # heads on the way that wait for quota
            k = q.active[i]
            head = q.heap[lines[k].begin] == tenants[lines[k].tenant].head
            if head and (last < 0 or before(q, last, k)) and before(q, k, found):
                keep(q, k)
        if admitted(q, found, True):
            return found
        last = found


@entry
def advance(s, q, code, strict, until, most):
    """Runs up to ``most`` event times, none after ``until``; says whether anything is left to happen.

    ``code``: which of SHARES; -1: all tenants have the same, and only the queue's order counts.
    """
    classes, jobs, lines, progress, counters = s.classes, q.jobs, q.lines, q.progress, q.counters
    for _ in range(most):
        now = next_event(jobs, q.running, progress)
        if now == np.inf or now > until:
            return False
        counters[EVENT] += 1
        while progress[RUNNING] and q.running[0].time == now:
            counters[CHANGED] = counters[EVENT]
            job = q.running[0].job
            pop_completion(q.running, progress)
            give_back(s, jobs[job].cls, jobs[job].slot)
            charge(q, code, jobs[job].line, -1)
            progress[COMPLETED] += 1
        while progress[ARRIVED] < len(jobs) and jobs[progress[ARRIVED]].submit == now:
            job, k = progress[ARRIVED], jobs[progress[ARRIVED]].line
            begin_waiting(lines, q.total, q.waits, k, job, now)
            if lines[k].size == 0:
                activate(q, k)
            push_rank(q.heap, lines, k, jobs[job].rank)
            progress[ARRIVED] += 1
        while True:
            k = next_line(q, classes, strict)
            if k < 0 or classes[lines[k].cls].blocked:
                break
            c, job = lines[k].cls, q.of_rank[q.heap[lines[k].begin]]
            if place(s, c, jobs[job].slot):
                pop_rank(q.heap, lines, k)
                end_waiting(lines, q.total, q.waits, k, job, now)
                if lines[k].size == 0:
                    lines[k].reason = -1
                    deactivate(q, k)
                charge(q, code, k, 1)
                jobs[job].start = now
                counters[CHANGED] = counters[EVENT]
                push_completion(q.running, progress, now + jobs[job].duration, job)
            else:
                classes[c].blocked = True
        for i in range(counters[ACTIVE]):
            k = q.active[i]
            c, reason = lines[k].cls, np.int64(QUOTA)
            if admitted(q, k, borrows(q, k)):
                if q.determined[c] < counters[CHANGED] or q.determined[c] < 0:
                    q.determined[c] = counters[EVENT]
                    classes[c].reason = why(s, c, jobs[q.of_rank[q.heap[lines[k].begin]]].slot)
                reason = classes[c].reason
            set_reason(lines, q.total, k, reason, now)
    return True


def loop(
    t: Tables, jobs: Jobs, rows: NDArray[np.int64], cluster: Cluster, order: Order, strict: bool,
    weights: NDArray[np.float64], limits: Limits,
) -> Advance:  # fmt: skip
    """``advance(most)``. The tables' jobs are ``rows`` of ``jobs``."""
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
    tenants["weight"] = weights
    counters = np.zeros(COUNTERS, np.int64)
    accounts, pools = np.zeros(limits.nominal.shape, ACCOUNT), np.zeros(limits.pool.shape, POOL)
    for name in ("nominal", "reserved", "limit"):
        accounts[name] = getattr(limits, name)
    pools["size"] = limits.pool
    whole = np.array([totals(cluster)], TOTAL)
    t.total = np.zeros((len(lines), t.total.shape[1]))
    code = _code(order) if order.share else -1
    if order.share:
        try:
            tenants["share"] = [order.share(each, whole.view(np.recarray)[0]) for each in tenants.view(np.recarray)]
            if np.isnan(tenants["share"]).any():
                raise ValueError(f"its result is {NO_KEY}")
        except Exception as error:
            raise ValueError(f"order '{order.name}': share: {type(error).__name__}: {error}") from error
    q = Queue(
        t.jobs, t.running, t.progress, t.total, t.waits, t.of_rank, np.zeros(len(rows), np.int32), tenants, lines,
        np.zeros(len(lines), np.int64), np.full(len(t.state.classes), -1, np.int64), counters, whole,
        limits.requested(jobs)[rows[first]], accounts, pools,
    )  # fmt: skip
    return lambda most: advance(t.state, q, code, strict, t.until, most)


def _code(order: Order) -> int:
    """What the engine knows an order's share by: its number, or a user's address."""
    if order in SHARES:
        return SHARES.index(order)
    try:
        return address_of(order.share, "", TENANT, TOTAL)  # type: ignore[arg-type]  # its caller has one
    except ValueError as error:
        raise ValueError(f"order '{order.name}': share: {error}; {PLAIN}") from error


def totals(cluster: Cluster) -> tuple[int, int, int]:
    """All GPUs (thousandths), cores (thousandths) and memory (MiB); 0 of what is unknown of some node."""
    known = [0 if (column < 0).any() else int(column.sum()) for column in (cluster.cpu, cluster.memory)]
    return cluster.total_gpus * WHOLE, known[0], known[1]
