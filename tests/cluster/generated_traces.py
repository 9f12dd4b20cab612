"""A profile with everything that a profile may have, and when two traces hold the same jobs."""

from __future__ import annotations

import numpy as np

from weft.cluster import Jobs
from weft.cluster.synthetic.arrivals import Arrivals
from weft.cluster.synthetic.distributions import LogNormal, Quantiles
from weft.cluster.synthetic.profile import Profile, Request, Size, Tenant

DAY = tuple(1.0 + (9 <= hour < 18) * 4.0 for hour in range(24))
WEEK = (3.0, 3.0, 3.0, 3.0, 2.0, 0.0, 1.0)
RICH = Profile(
    {
        "1": Size(0.7, (Request(1, milli=500, cpu=4000, types=("A", "B"), share=3), Request(1)), LogNormal(100.0, 1.0)),
        "8": Size(
            0.3,
            (Request(8, pods=2, gpu_memory=40.0, memory=1024, priority=2.0),),
            Quantiles((0.1, 0.5, 0.9), (10.0, 10.0, 1000.0)),
            Quantiles((0.0, 1.0), (1.0, 4.0)),
        ),
    },
    {"a": Tenant(3.0), "b": Tenant(1.0, {"8": 1.0}, {"8": LogNormal(7.0, 0.0)})},
    Arrivals(500.0, DAY, WEEK, 0.5, 0.5, True),
    0.6,
    0.5,
)


def same(a: Jobs, b: Jobs) -> bool:
    """The same rows, whatever indices their tenants and types have."""

    def words(jobs):
        return [jobs.tenants[t] for t in jobs.tenant], [jobs.type_sets[t] for t in jobs.types]

    plain = [name for name in Jobs.columns() if name not in ("types", "tenant")]
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in plain) and words(a) == words(b)
