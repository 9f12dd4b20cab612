"""Random traces, clusters and policies."""

from typing import Any

import numpy as np

from weft.cluster import Cluster, Jobs, NodeGroup
from weft.cluster.orders import ORDERS
from weft.cluster.placements import PLACEMENTS
from weft.cluster.quota import Quota

TOPOLOGY = ("topology", "topology-required")
RACKS = ({}, {"rack": "x"}, {"rack_nodes": 1}, {"rack_nodes": 2}, {"rack": "x", "nvlink_domain": "x1"},
         {"rack": "y", "nvlink_domain": "y1"}, {"nvlink_domain_nodes": 2}, {"rack": "z"},
         {"rack_nodes": 4, "nvlink_domain_nodes": 2})  # fmt: skip
ALL = [order for order in ORDERS.values() if not (order.rounds and order.rounds.quotas)]
SHARED = [order.name for order in ALL if order.share]
KINDS = (
    [f"{order.name}{mode}" for order in ALL for mode in order.modes if not order.preemptive],
    [f"{order.name}{mode}" for order in ALL for mode in ("", "-skip") if not order.preemptive],  # with quotas
    [order.name for order in ALL if order.preemptive],
)


def random_jobs(count: int, seed: int = 0) -> Jobs:
    g = np.random.default_rng(seed)
    submit, duration = np.cumsum(g.integers(0, 3, count)), g.choice([1.0, 2.0, 5.0, 40.0], count)
    gpus, tenant, types = g.choice([1, 2, 4, 8], count), g.integers(0, 3, count), g.integers(0, 2, count)
    words = {"tenants": ("x", "y", "z"), "type_sets": ((), ("gpu", "other")), "id": [f"job {i}" for i in range(count)]}
    return Jobs(submit, duration, gpus, tenant=tenant, types=types, **words)


def random_quota(g: np.random.Generator) -> Quota:
    """Of GPUs, and by chance of cores and memory."""

    def limits(nominal: list[float], unit: float) -> list[float]:
        own, lent = float(g.choice(nominal)) * unit, float(g.choice([0, 1, 4]))
        return [own, float(g.choice([0, 1, 4, np.inf])) * unit, min(own, lent) if g.random() < 0.5 else np.inf]

    more = {"cpu": 1.0, "memory_gb": 4.0}
    chosen = {name: Quota(*limits([2, 4, 16], unit)) for name, unit in more.items() if g.random() < 0.3}
    return Quota(*limits([0, 2.5, 4, 8, 16], 1.0), **chosen)


def random_case(seed: int) -> tuple[Jobs, Cluster, dict[str, Any]]:
    """Jobs, a cluster and a policy: by turns of any order, of one that takes quotas, and of one that preempts."""
    g = np.random.default_rng(seed)
    order, racks = str(g.choice(KINDS[seed % 3])), g.random() < 0.5
    planned = order.endswith("-conservative")
    others = [name for name, each in PLACEMENTS.items() if not each.topology and not (planned and each.detailed)]
    placement = str(g.choice([*TOPOLOGY, TOPOLOGY[1]] if racks and not planned else others))
    groups = [
        NodeGroup(
            int(g.integers(1, 4)), int(g.choice([1, 2, 4, 8, 8])), str(g.choice(["A", "A", "B"])),
            float(g.choice([0, 16, 48])), float(g.choice([0, 0, 8, 16])), float(g.choice([0, 0, 64])),
            **(RACKS[g.integers(len(RACKS))] if racks else {}),
        )
        for _ in range(int(g.integers(1, 4 if racks else 3)))
    ]  # fmt: skip
    count, slow = int(g.integers(10, 50)), float(g.choice([1, 1, 400]))  # so long that levels of service are passed
    pods, gpus = g.choice([0, 0, 0, 1, 2, 3], count), g.choice([0, 1, 1, 1, 2, 2, 3, 4, 8, 8, 12, 16], count)
    shared = g.random() < 0.7 and not planned and not PLACEMENTS[placement].counted
    jobs = Jobs(
        submit=np.sort(g.integers(0, 30, count)) * slow, duration=g.choice([0, 1, 2, 3.5, 10, 20, 30], count) * slow,
        gpus=np.where(pods > 0, gpus // np.maximum(pods, 1) * pods, gpus), pods=pods,
        milli=g.choice([1000, 1000, 700, 500, 500, 300, 250], count) if shared else None,
        estimate=g.choice([1, 2, 10, 30], count) * slow, gpu_memory=g.choice([0, 0, 0, 16, 32], count),
        cpu=g.choice([0, 0, 1000, 4000], count), memory=g.choice([0, 0, 1024, 20_000], count),
        types=g.choice([0, 0, 0, 1], count), type_sets=((), ("B",)), priority=g.integers(0, 4, count),
        tenant=g.integers(0, 3, count), tenants=("a", "b", "c"),
    )  # fmt: skip
    ties = str(g.choice(["lowest", "highest", "random"]))
    policy = {"order": order, "placement": placement, "ties": ties, "seed": seed % 5}
    if order in KINDS[2]:
        policy |= {"restart_s": float(g.choice([0, 0, 1.5])), "checkpoint_s": float(g.choice([0, 0, 2.0]))}
    if order.removesuffix("-skip") in SHARED:
        policy["weights"] = {name: float(g.choice([0.5, 1, 2, 3])) for name in "abc" if g.random() < 0.7}
    if seed % 3 == 1:
        policy["quotas"] = {name: random_quota(g) for name in "abc*" if g.random() < 0.7}
    return jobs, Cluster.of(groups), policy
