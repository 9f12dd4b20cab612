"""Orders among tenants, and quotas. The compiled form is ``engine/tenant_loop.py``."""

import math
from dataclasses import dataclass

from weft.cluster.cohort import Cohort
from weft.cluster.model import WHOLE
from weft.cluster.quota import NO_TENANTS
from weft.cluster.reference.model import Job
from weft.cluster.reference.state import State


@dataclass
class Usage:
    """GPUs and cores in thousandths, memory in MiB: what a tenant's jobs hold, or all that a cluster has."""

    gpus: int
    cpu: int
    memory: int
    weight: float = 1.0


def usage_of(sim: State, tenant: str) -> Usage:
    jobs = [job for job in sim.running if job.tenant == tenant]
    return Usage(
        sum(job.milli_gpus for job in jobs),
        sum(int(job.row.cpu[0]) for job in jobs),
        sum(int(job.row.memory[0]) for job in jobs),
        sim.weights.get(tenant, 1.0),
    )


def share(sim: State, tenant: str) -> float:
    """The tenant's share by the order, of which the least comes first; 0 for an order that looks at no tenants."""
    if sim.order.share is None:
        return 0.0
    cpu, memory = [n.cpu for n in sim.nodes], [n.memory for n in sim.nodes]
    whole = Usage(
        sum(n.gpus for n in sim.nodes) * WHOLE,
        0 if min(cpu) < 0 else sum(cpu),
        0 if min(memory) < 0 else sum(memory),
    )
    found = float(sim.order.share(usage_of(sim, tenant), whole))
    if math.isnan(found):
        raise ValueError(f"the share of tenant '{tenant}' at {sim.now:g} s is nan; expected a number")
    return found


def start_by_share(sim: State) -> None:
    """Starts jobs one by one; after each start the tenants are ordered anew. Strict: a tenant's first job blocks the
    others of that tenant; it blocks all jobs where its quota admits it and it fits on no nodes."""
    waiting = list(sim.queue)
    while waiting:
        cohort = cohort_of(sim)
        admitted = (j for j in in_order(sim, waiting) if cohort.admits(j))
        job = next(admitted, None) if sim.mode else next_head(sim, waiting)
        if job is None:
            return
        waiting.remove(job)
        if sim.place(job):
            sim.start(job, job.estimate)
        elif not sim.mode:
            return


def in_order(sim: State, jobs: list[Job]) -> list[Job]:
    cohort, shares = cohort_of(sim), {tenant: share(sim, tenant) for tenant in {job.tenant for job in jobs}}
    return sorted(jobs, key=lambda j: (cohort.borrows(j), shares[j.tenant], j.key))


def next_head(sim: State, waiting: list[Job]) -> Job | None:
    """The first of the tenants' heads that the quotas admit. A head before it that waits for quota keeps the cohort's for
    itself: within its tenant's nominal quota, or with what that may borrow, if the head would borrow. A head that requests
    more than the nominal quota of what it lacks keeps nothing (Kueue's StrictFIFO)."""
    sim.kept, cohort = {}, cohort_of(sim)
    heads = in_order(sim, [j for j in waiting if j is next(o for o in waiting if o.tenant == j.tenant)])
    while heads and not cohort.admits(heads[-1]):
        heads.pop()
    for head in heads:
        if cohort.admits(head, sim.kept):
            return head
        if not cohort.admits(head):
            sim.kept[head.tenant] = to_keep(cohort, head)
    return None


def to_keep(cohort: Cohort, head: Job) -> list[int]:
    """Of each resource what the pool keeps for a head that waits for quota."""
    requested, tenant = cohort.requested(head), head.tenant
    most = cohort.limit[tenant] if cohort.borrows(head) else cohort.nominal[tenant]
    for r in {*cohort.beyond(cohort.limit, head), *cohort.lacking(head)}:
        if requested[r] > cohort.nominal[tenant][r]:
            return [0] * len(requested)
    amounts = [max(min(amount, most[r] - cohort.held[tenant][r]), 0) for r, amount in enumerate(requested)]
    return [cohort.in_pool(tenant, r, amount) - cohort.in_pool(tenant, r) for r, amount in enumerate(amounts)]


def cohort_of(sim: State) -> Cohort:
    return Cohort(sim.quotas, sim.tenants, sim.running)


def waits_for_quota(sim: State, job: Job) -> bool:
    """Whether it would wait for its quota if it were alone in the queue, beside what is kept for other tenants' heads."""
    if not sim.quotas:
        return False
    cohort = cohort_of(sim)
    return not cohort.admits(job, sim.kept if cohort.borrows(job) else NO_TENANTS)


def never_admitted(sim: State, job: Job) -> str:
    """Why the quotas can never admit a job; empty where they can."""
    cohort = Cohort(sim.quotas, sim.tenants)
    return cohort.limits.why_never_admitted(cohort.names.index(job.tenant), job.tenant, cohort.requested(job))
