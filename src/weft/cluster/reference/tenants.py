"""Orders among tenants, and quotas. The compiled form is ``engine/tenant_loop.py``."""

from dataclasses import dataclass

from weft.cluster import quota
from weft.cluster.model import WHOLE
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
    return sim.order.share(usage_of(sim, tenant), whole)


def start_by_share(sim: State) -> None:
    """Starts jobs one by one; after each start the tenants are ordered anew. Strict: a tenant's first job blocks the
    others of that tenant; it blocks all jobs where its quota admits it and it fits on no nodes."""
    waiting = list(sim.queue)
    while waiting:
        job = next((j for j in in_order(sim, waiting) if admits(sim, j)), None) if sim.mode else next_head(sim, waiting)
        if job is None:
            return
        waiting.remove(job)
        if sim.place(job):
            sim.start(job, job.estimate)
        elif not sim.mode:
            return


def in_order(sim: State, jobs: list[Job]) -> list[Job]:
    return sorted(jobs, key=lambda j: (borrows(sim, j), share(sim, j.tenant), j.key))


def next_head(sim: State, waiting: list[Job]) -> Job | None:
    """The first of the tenants' heads that the quotas admit. A head before it that waits for its tenant's nominal quota
    reserves that of the cohort (Kueue's StrictFIFO)."""
    sim.reserved = {}
    heads = in_order(sim, [j for j in waiting if j is next(o for o in waiting if o.tenant == j.tenant)])
    while heads and not admits(sim, heads[-1]):
        heads.pop()
    for head in heads:
        if admits(sim, head, sum(sim.reserved.values())):
            return head
        nominal = quota.nominal_of(sim.quotas, head.tenant)
        if head.milli_gpus <= nominal:
            sim.reserved[head.tenant] = max(min(head.milli_gpus, nominal - usage_of(sim, head.tenant).gpus), 0)
    return None


def admits(sim: State, job: Job, reserved: int = 0) -> bool:
    """Whether the tenant's quota, and the quotas of all tenants together, admit the job beside the running ones and what is
    reserved for others."""
    if not sim.quotas or not job.milli_gpus:
        return True
    in_use = sum(other.milli_gpus for other in sim.running) + reserved
    used = usage_of(sim, job.tenant).gpus
    return used + job.milli_gpus <= quota.limit_of(
        sim.quotas, job.tenant
    ) and in_use + job.milli_gpus <= quota.cohort_of(sim.quotas, sim.tenants)


def waits_for_quota(sim: State, job: Job) -> bool:
    """Whether it would wait for its quota if it were alone in the queue, beside what heads of other tenants reserve."""
    others = sum(amount for tenant, amount in sim.reserved.items() if tenant != job.tenant)
    return not admits(sim, job, others if borrows(sim, job) else 0)


def borrows(sim: State, job: Job) -> bool:
    """Whether its tenant would hold more than its nominal quota with it."""
    if not sim.quotas or not job.milli_gpus:
        return False
    return usage_of(sim, job.tenant).gpus + job.milli_gpus > quota.nominal_of(sim.quotas, job.tenant)


def never_admitted(sim: State, job: Job) -> str:
    """Why the quotas can never admit a job; empty where they can."""
    cohort = quota.cohort_of(sim.quotas, sim.tenants)
    if not sim.quotas or not job.milli_gpus or job.milli_gpus <= min(quota.limit_of(sim.quotas, job.tenant), cohort):
        return ""
    return quota.why_never_admitted(job.tenant, job.milli_gpus, quota.quota_of(sim.quotas, job.tenant), cohort)
