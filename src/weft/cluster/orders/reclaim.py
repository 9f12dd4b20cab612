"""First in, first out under quotas that are reclaimed: a job within its tenant's nominal quota preempts jobs of tenants that
borrow, the last started first, as Kueue does with ``reclaimWithinCohort: Any``. In plain Python."""

from typing import Any

from weft.cluster.cohort import Cohort
from weft.cluster.order import Order, Rounds


def importance(job):
    return -job.row.priority[0]


def own_and_borrowed(cohort, jobs):
    """Running jobs, the oldest first: those that their tenants' nominal quotas cover, and those beyond."""
    own, borrowed = list[Any](), list[Any]()
    for job in sorted(jobs, key=lambda job: (importance(job), job.last_start, job.number)):
        (borrowed if cohort.borrows(job) else own).append(job)
        cohort.add(job)
    return own, borrowed


def take_last(cohort, borrowed, lacking):
    """The last started of the jobs that hold some of a resource that is lacking, whose tenant borrows of that."""
    for i in reversed(range(len(borrowed))):
        held, nominal = cohort.held[borrowed[i].tenant], cohort.nominal[borrowed[i].tenant]
        requested = cohort.requested(borrowed[i])
        if any(requested[r] and held[r] > nominal[r] for r in lacking):
            return borrowed.pop(i)
    raise RuntimeError("no tenant borrows, and the pool of quotas is used up")


def decide(view):
    """Jobs within their tenant's nominal quota first, running or not; then borrowing ones, while no owner claims the GPUs."""
    cohort = Cohort(view.simulator.quotas, view.simulator.tenants)
    own, borrowed = own_and_borrowed(cohort, [job for job in view.jobs if job.state == "running"])
    waiting = sorted(
        (job for job in view.jobs if job.state != "running"), key=lambda job: (importance(job), job.number)
    )
    claims, preempted, borrowing = dict[int, Any](), list[Any](), list[Any]()
    again = True
    while again:  # a preempted job may leave its own tenant below its quota, which an earlier job then claims
        again = False
        for job in waiting:
            if job.number in claims or cohort.borrows(job):
                continue
            while lacking := cohort.lacking(job):  # borrowed quota is reclaimed
                preempted.append(take_last(cohort, borrowed, lacking))
                cohort.add(preempted[-1], -1)
                again = True
            cohort.add(job)
            claims[job.number] = job
    for job in (*reversed(preempted), *waiting):  # a job that need not be preempted after all goes on
        if job.number not in claims and cohort.admits(job):
            cohort.add(job)
            borrowing.append(job)
    return [*own, *claims.values(), *borrowed, *borrowing]


ORDER = Order(
    "reclaim",
    lambda jobs: (-jobs.priority,),
    "as fifo-skip, and borrowed quota is reclaimed",
    rounds=Rounds(decide, quotas=True),
)
