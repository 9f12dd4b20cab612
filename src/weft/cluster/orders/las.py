"""Least attained service, in levels (Tiresias, Gu et al., NSDI 2019): jobs past a threshold come after all others."""

from weft.cluster.order import FIXED, Order, Preemption

LEVELS = (3250.0, 7200.0)  # of Tiresias' public simulator


def level_then_sequence(job, remaining, served):
    return job.level * 2.0**43 + job.sequence


ORDER = Order(
    "las",
    lambda jobs: (),
    "the least time served first, in levels, preempting others",
    validated={"": "Tiresias' simulator on its own, Muri's and a Philly trace"},
    preemption=Preemption(level_then_sequence, FIXED, LEVELS),
)
