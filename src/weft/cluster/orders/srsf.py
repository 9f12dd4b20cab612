"""Shortest remaining service first: time remaining × GPUs."""

from weft.cluster.order import FREE, Order, Preemption


def service_remaining(job, remaining, served):
    return remaining * job.gpus


ORDER = Order(
    "srsf",
    lambda jobs: (jobs.estimate * jobs.gpus,),
    "the least time remaining × GPUs first, preempting others",
    validated={"": "Tiresias' simulator on Muri's and a Philly trace"},
    preemption=Preemption(service_remaining, FREE),
)
