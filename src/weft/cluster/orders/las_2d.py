"""Least attained service in two dimensions, time × GPUs, in levels (Tiresias, Gu et al., NSDI 2019)."""

from weft.cluster.order import FIXED, Order, Preemption
from weft.cluster.orders.las import LEVELS, level_then_sequence

ORDER = Order(
    "2d-las",
    lambda jobs: (),
    "the least GPU time served first, in levels, preempting others",
    validated={"": "Tiresias' simulator on its own, Muri's and a Philly trace"},
    preemption=Preemption(level_then_sequence, FIXED, LEVELS, by_gpus=True),
)
