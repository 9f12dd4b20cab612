"""First in, first out under quotas that are taken back: whose job stays within its tenant's nominal quota stops jobs of tenants
that borrow, the last started first, as Kueue does with ``reclaimWithinCohort: Any``. In plain Python."""

from __future__ import annotations

from collections import Counter

from weft.cluster import tenants
from weft.cluster.model import WHOLE
from weft.cluster.order import Order, Rounds
from weft.cluster.parts import Job
from weft.cluster.tenants import gpus_of, name_of


def importance(job):
    return -job.row.priority[0]


def own_and_borrowed(sim, jobs):
    """Running jobs, the oldest first: those that their tenants' nominal quotas cover, and those beyond; and what each holds."""
    held: Counter[str] = Counter()
    own, borrowed = list[Job](), list[Job]()
    for job in sorted(jobs, key=lambda job: (importance(job), job.begins, job.number)):
        held[name_of(job)] += gpus_of(job)
        (own if held[name_of(job)] <= nominal(sim, name_of(job)) else borrowed).append(job)
    return own, borrowed, held


def nominal(sim, tenant):
    return round(tenants.quota_of(sim, tenant).nominal * WHOLE)


def decide(view):
    """Who stays within its nominal quota, running or not; then who borrows, while nobody else claims it."""
    sim = view.simulator
    own, borrowed, held = own_and_borrowed(sim, [job for job in view.jobs if job.state == "running"])
    waiting = sorted(
        (job for job in view.jobs if job.state != "running"), key=lambda job: (importance(job), job.number)
    )
    together = tenants.together(sim)
    claims, stopped, borrowing = list[Job](), list[Job](), list[Job]()
    for job in waiting:
        if held[name_of(job)] + gpus_of(job) <= nominal(sim, name_of(job)):
            while held.total() + gpus_of(job) > together:  # what is lent is taken back
                stopped.append(borrowed.pop())
                held[name_of(stopped[-1])] -= gpus_of(stopped[-1])
            held[name_of(job)] += gpus_of(job)
            claims.append(job)
    claimed = {job.number for job in claims}
    for job in (*reversed(stopped), *waiting):  # who need not be stopped after all goes on
        asked, tenant = gpus_of(job), name_of(job)
        if (
            job.number not in claimed
            and held[tenant] + asked <= tenants.most(sim, tenant)
            and held.total() + asked <= together
        ):
            held[tenant] += asked
            borrowing.append(job)
    return [*own, *claims, *borrowed, *borrowing]


ORDER = Order(
    "reclaim",
    lambda jobs: (-jobs.priority,),
    "as fifo-skip, and lent quotas are taken back",
    rounds=Rounds(decide, quotas=True),
)
