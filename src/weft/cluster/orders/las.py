"""Least attained service, in levels (Tiresias, Gu et al., NSDI 2019): who has run for longer comes after all who have not."""

from __future__ import annotations

from weft.cluster.order import FIXED, Order, Preemption

LEVELS = (3250.0, 7200.0)  # of Tiresias' public simulator


def level_then_turn(job, left, served):
    return job.level * 2.0**43 + job.turn


ORDER = Order(
    "las",
    lambda jobs: (),
    "the least time served first, in levels, stopping others",
    validated={"": "Tiresias' simulator on its own, Muri's and a Philly trace"},
    preemption=Preemption(level_then_turn, FIXED, LEVELS),
)
