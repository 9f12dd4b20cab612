"""Traces that are drawn at random, for tests of what is worked out from schedules."""

from __future__ import annotations

import numpy as np

from weft.cluster import Jobs


def random_jobs(count: int, seed: int = 0) -> Jobs:
    g = np.random.default_rng(seed)
    return Jobs(
        submit=np.cumsum(g.integers(0, 3, count)),
        duration=g.choice([1.0, 2.0, 5.0, 40.0], count),
        gpus=g.choice([1, 2, 4, 8], count),
        tenant=g.integers(0, 3, count),
        tenants=("x", "y", "z"),
        types=g.integers(0, 2, count),
        type_sets=((), ("gpu", "other")),
        id=[f"job {i}" for i in range(count)],
    )
