"""Random traces, clusters and policies."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.cluster import Cluster, Jobs, NodeGroup
from weft.cluster.orders import ORDERS
from weft.cluster.placements import PLACEMENTS

PREEMPTIVE = [name for name, order in ORDERS.items() if order.preemptive and not (order.rounds and order.rounds.quotas)]
TOPOLOGY = ("topology", "topology-required")
ON_NODES = [name for name, each in PLACEMENTS.items() if not each.counted and not each.topology]
RACKS = ({}, {"rack": "x"}, {"rack_nodes": 1}, {"rack_nodes": 2}, {"rack": "x", "nvlink_domain": "x1"},
         {"rack": "y", "nvlink_domain": "y1"}, {"nvlink_domain_nodes": 2}, {"rack": "z"},
         {"rack_nodes": 4, "nvlink_domain_nodes": 2})  # fmt: skip


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


def preemption_case(seed: int, racks: bool) -> tuple[Jobs, Cluster, dict[str, Any]]:
    """Jobs, a cluster (with racks, for a placement that looks at them), and the policy and costs of an order that preempts."""
    g = np.random.default_rng(seed)
    count = int(g.integers(5, 40))
    groups = [
        NodeGroup(
            int(g.integers(1, 4)), int(g.choice([2, 4, 8])), str(g.choice(["A", "A", "B"])),
            float(g.choice([0, 16, 48])), float(g.choice([0, 0, 8, 16])), float(g.choice([0, 0, 64])),
            **(RACKS[g.integers(len(RACKS))] if racks else {}),
        )
        for _ in range(int(g.integers(1, 5 if racks else 3)))
    ]  # fmt: skip
    pods, gpus = g.choice([0, 0, 0, 1, 2, 3], count), g.choice([0, 1, 1, 1, 2, 2, 3, 4, 8, 8, 12, 16], count)
    slow = float(g.choice([1, 1, 400]))  # so long that levels of service are passed
    jobs = Jobs(
        submit=np.sort(g.integers(0, 40, count)) * slow,
        duration=g.choice([0, 1, 2, 3.5, 10, 20, 30], count) * slow,
        gpus=np.where(pods > 1, np.minimum(gpus, 4) * pods, gpus),
        pods=pods,
        milli=g.choice([1000, 1000, 700, 500, 500, 300, 250], count) if g.random() < (0.4 if racks else 0.85) else None,
        estimate=g.choice([1, 2, 10, 30], count) * slow,
        gpu_memory=g.choice([0, 0, 0, 16, 32], count),
        cpu=g.choice([0, 0, 1000, 4000], count),
        memory=g.choice([0, 0, 1024, 20_000], count),
        types=g.choice([0, 0, 0, 1], count),
        type_sets=((), ("B",)),
        priority=g.integers(0, 4, count),
    )
    policy = {
        "order": str(g.choice(PREEMPTIVE)),
        "placement": str(g.choice(TOPOLOGY if racks else ON_NODES)),
        "ties": str(g.choice(["lowest", "highest", "random"])),
        "seed": seed % 5,
        "restart_s": float(g.choice([0, 0, 1.5])),
        "checkpoint_s": float(g.choice([0, 0, 2.0])),
    }
    return jobs, Cluster.of(groups), policy
