"""The highest priority first, and it preempts lower ones, as the scheduler of Kubernetes does."""

from weft.cluster.order import FIXED, Order, Preemption


def importance(job, remaining, served):
    return -job.priority


ORDER = Order(
    "priority-preemptive",
    lambda jobs: (-jobs.priority,),
    "the highest priority first, preempting lower ones",
    preemption=Preemption(importance, FIXED),
)
