"""Shortest remaining service first: time left × GPUs."""

from __future__ import annotations

from weft.cluster.order import FREE, Order, Preemption


def service_left(job, left, served):
    return left * job.gpus


ORDER = Order(
    "srsf",
    lambda jobs: (jobs.estimate * jobs.gpus,),
    "the least time left × GPUs first, stopping others",
    validated={"": "Tiresias' simulator on Muri's and a Philly trace"},
    preemption=Preemption(service_left, FREE),
)
