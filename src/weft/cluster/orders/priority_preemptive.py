"""The highest priority first, and it takes the room of lower ones, as the scheduler of Kubernetes does."""

from __future__ import annotations

from weft.cluster.order import FIXED, Order, Preemption


def importance(job, left, served):
    return -job.priority


ORDER = Order(
    "priority-preemptive",
    lambda jobs: (-jobs.priority,),
    "the highest priority first, stopping lower ones",
    preemption=Preemption(importance, FIXED),
)
