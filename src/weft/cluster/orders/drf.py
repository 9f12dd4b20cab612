"""Dominant resource fairness (Ghodsi et al., NSDI 2011): the tenant with the least dominant share, divided by its weight.

A tenant's dominant share is the largest of its shares of the cluster's GPUs, cores and main memory. A resource that some node
does not tell is left out.
"""

from typing import Any

from weft.cluster.order import Order


def share(tenant: Any, cluster: Any) -> float:
    dominant = 0.0
    if cluster.gpus > 0:
        dominant = tenant.gpus / cluster.gpus
    if cluster.cpu > 0:
        dominant = max(dominant, tenant.cpu / cluster.cpu)
    if cluster.memory > 0:
        dominant = max(dominant, tenant.memory / cluster.memory)
    found: float = dominant / tenant.weight
    return found


ORDER = Order("drf", lambda jobs: (), "the tenant with the least dominant share for its weight", share=share)
