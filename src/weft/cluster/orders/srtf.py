"""Shortest remaining time first: a running job is preempted for one that has less remaining, by the estimates."""

from weft.cluster.order import FALLING, Order, Preemption


def remaining_of(job, remaining, served):
    return remaining


ORDER = Order(
    "srtf",
    lambda jobs: (jobs.estimate,),
    "the least time remaining first, preempting others",
    validated={"": "Tiresias' simulator on its own, Muri's and a Philly trace"},
    preemption=Preemption(remaining_of, FALLING),
)
