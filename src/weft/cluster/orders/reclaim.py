"""First in, first out under quotas that are reclaimed: a job within its tenant's nominal quota preempts jobs of tenants that
borrow, the last started first, as Kueue does with ``reclaimWithinCohort: Any``. In plain Python."""

from collections import Counter
from typing import Any

from weft.cluster import quota
from weft.cluster.order import Order, Rounds


def importance(job):
    return -job.row.priority[0]


def own_and_borrowed(quotas, jobs):
    """Running jobs, the oldest first: those that their tenants' nominal quotas cover, and those beyond; and what each holds."""
    held: Counter[str] = Counter()
    own, borrowed = list[Any](), list[Any]()
    for job in sorted(jobs, key=lambda job: (importance(job), job.last_start, job.number)):
        held[job.tenant] += job.milli_gpus
        (own if held[job.tenant] <= quota.nominal_of(quotas, job.tenant) else borrowed).append(job)
    return own, borrowed, held


def decide(view):
    """Jobs within their tenant's nominal quota first, running or not; then borrowing ones, while no owner claims the GPUs."""
    quotas = view.simulator.quotas
    own, borrowed, held = own_and_borrowed(quotas, [job for job in view.jobs if job.state == "running"])
    waiting = sorted(
        (job for job in view.jobs if job.state != "running"), key=lambda job: (importance(job), job.number)
    )
    cohort = quota.cohort_of(quotas, view.simulator.tenants)
    claims, preempted, borrowing = dict[int, Any](), list[Any](), list[Any]()
    again = True
    while again:  # a preempted job may leave its own tenant below its quota, which an earlier job then claims
        again = False
        for job in waiting:
            if job.number in claims or held[job.tenant] + job.milli_gpus > quota.nominal_of(quotas, job.tenant):
                continue
            while held.total() + job.milli_gpus > cohort:  # borrowed quota is reclaimed
                preempted.append(borrowed.pop())
                held[preempted[-1].tenant] -= preempted[-1].milli_gpus
                again = True
            held[job.tenant] += job.milli_gpus
            claims[job.number] = job
    for job in (*reversed(preempted), *waiting):  # a job that need not be preempted after all goes on
        if (
            job.number not in claims
            and held[job.tenant] + job.milli_gpus <= quota.limit_of(quotas, job.tenant)
            and held.total() + job.milli_gpus <= cohort
        ):
            held[job.tenant] += job.milli_gpus
            borrowing.append(job)
    return [*own, *claims.values(), *borrowed, *borrowing]


ORDER = Order(
    "reclaim",
    lambda jobs: (-jobs.priority,),
    "as fifo-skip, and borrowed quota is reclaimed",
    rounds=Rounds(decide, quotas=True),
)
