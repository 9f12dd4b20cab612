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
        heads = [j for j in waiting if sim.mode or j is next(o for o in waiting if o.tenant == j.tenant)]
        heads = [j for j in heads if admits(sim, j)]
        if not heads:
            return
        job = min(heads, key=lambda j: (borrows(sim, j), share(sim, j.tenant), j.key))
        waiting.remove(job)
        if sim.place(job):
            sim.start(job, job.estimate)
        elif not sim.mode:
            return


def admits(sim: State, job: Job) -> bool:
    """Whether the tenant's quota, and the quotas of all tenants together, admit the job beside the running ones."""
    if not sim.quotas or not job.milli_gpus:
        return True
    in_use = sum(other.milli_gpus for other in sim.running)
    used = usage_of(sim, job.tenant).gpus
    return used + job.milli_gpus <= quota.limit_of(
        sim.quotas, job.tenant
    ) and in_use + job.milli_gpus <= quota.cohort_of(sim.quotas, sim.tenants)


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
