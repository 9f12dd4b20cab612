"""Tenants in the reference engine: whose turn it is, and what a quota admits. Compiled in ``engine/tenants.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.cluster import quota
from weft.cluster.model import WHOLE
from weft.cluster.parts import Job
from weft.cluster.quota import OTHERS, Quota

if TYPE_CHECKING:
    from weft.cluster.reference import Simulator


@dataclass
class Held:
    """GPUs and cores in thousandths, memory in MiB: what a tenant's jobs hold, or all that a cluster has."""

    gpus: int
    cpu: int
    memory: int
    weight: float = 1.0


def name_of(job: Job) -> str:
    return job.row.tenants[int(job.row.tenant[0])]


def gpus_of(job: Job) -> int:
    """Thousandths that it asks."""
    return int(job.row.gpus[0] * job.row.milli[0])


def held_by(sim: Simulator, tenant: str) -> Held:
    rows = [j.row for j in sim.jobs.values() if j.state == "running" and name_of(j) == tenant]
    return Held(
        sum(int(row.gpus[0] * row.milli[0]) for row in rows),
        sum(int(row.cpu[0]) for row in rows),
        sum(int(row.memory[0]) for row in rows),
        sim.weights.get(tenant, 1.0),
    )


def share(sim: Simulator, tenant: str) -> float:
    """The order's, of which the least comes first; where it knows no tenants all have the same."""
    if sim.order.share is None:
        return 0.0
    cpu, memory = [n.cpu for n in sim.nodes], [n.memory for n in sim.nodes]
    whole = Held(
        sum(n.gpus for n in sim.nodes) * WHOLE,
        0 if min(cpu) < 0 else sum(cpu),
        0 if min(memory) < 0 else sum(memory),
    )
    return sim.order.share(held_by(sim, tenant), whole)


def start_in_turn(sim: Simulator) -> None:
    """Starts who may, and looks anew after each start whose turn it is. Strictly, each tenant's first job keeps the others of
    that tenant waiting; so it keeps everybody where its quota admits it and no nodes do."""
    waiting = list(sim.queue)
    while waiting:
        heads = [j for j in waiting if sim.mode or j is next(o for o in waiting if name_of(o) == name_of(j))]
        heads = [j for j in heads if admits(sim, j)]
        if not heads:
            return
        job = min(heads, key=lambda j: (borrows(sim, j), share(sim, name_of(j)), j.key))
        waiting.remove(job)
        if sim.place(job):
            sim.begin(job, job.row.estimate[0].item())
        elif not sim.mode:
            return


# ---- quotas ----------------------------------------------------------------------------------------------------------


def quota_of(sim: Simulator, tenant: str) -> Quota:
    return sim.quotas.get(tenant, sim.quotas.get(OTHERS, Quota(0.0)))


def together(sim: Simulator) -> int:
    """What all tenants of the cohort may hold, thousandths of GPUs."""
    names = sim.tenants.keys() | sim.quotas.keys() - {OTHERS}
    return sum(round(quota_of(sim, name).nominal * WHOLE) for name in names)


def most(sim: Simulator, tenant: str) -> float:
    """What a tenant may hold."""
    own = quota_of(sim, tenant)
    borrowed = own.borrowing_limit * WHOLE
    return round(own.nominal * WHOLE) + (round(borrowed) if borrowed < math.inf else borrowed)


def admits(sim: Simulator, job: Job) -> bool:
    """Whether the tenant's quota, and the cohort, have room for it beside what runs."""
    asked, tenant = gpus_of(job), name_of(job)
    if not sim.quotas or not asked:
        return True
    running = sum(gpus_of(j) for j in sim.jobs.values() if j.state == "running")
    return held_by(sim, tenant).gpus + asked <= most(sim, tenant) and running + asked <= together(sim)


def borrows(sim: Simulator, job: Job) -> bool:
    """Whether its tenant would hold more than its own with it."""
    asked, tenant = gpus_of(job), name_of(job)
    own = round(quota_of(sim, tenant).nominal * WHOLE)
    return bool(sim.quotas and asked) and held_by(sim, tenant).gpus + asked > own


def never(sim: Simulator, job: Job) -> str:
    """Why its quota can never admit a job; nothing where it can."""
    asked, tenant = gpus_of(job), name_of(job)
    if not sim.quotas or not asked or asked <= min(most(sim, tenant), together(sim)):
        return ""
    return quota.lacking(tenant, asked, quota_of(sim, tenant), together(sim))
