"""Shortest remaining time first: a running job is stopped for one that has less left, by the estimates."""

from __future__ import annotations

from weft.cluster.order import FALLING, Order, Preemption


def left_of(job, left, served):
    return left


ORDER = Order(
    "srtf",
    lambda jobs: (jobs.estimate,),
    "the least time left first, stopping others",
    validated={"": "Tiresias' simulator on its own, Muri's and a Philly trace"},
    preemption=Preemption(left_of, FALLING),
)
