"""Weighted fair share: the tenant whose GPUs in use, divided by its weight, are the fewest."""

from typing import Any

from weft.cluster.order import Order


def share(tenant: Any, cluster: Any) -> float:
    found: float = tenant.gpus / tenant.weight
    return found


ORDER = Order("fair-share", lambda jobs: (), "the tenant with the fewest GPUs for its weight", share=share)
