"""Traces from stated parameters: Poisson arrivals, log-normal durations, a mix of sizes; labelled as generated."""

from collections.abc import Mapping

import numpy as np

from weft.cluster.model import Cluster, Jobs

# A training cluster's mix of sizes: GPUs of a job → share of jobs.
SIZES = {1: 0.60, 2: 0.10, 4: 0.10, 8: 0.12, 16: 0.04, 32: 0.03, 64: 0.01}


def generate(
    count: int,
    cluster: Cluster,
    *,
    load: float = 0.7,
    median_s: float = 600.0,
    sigma: float = 2.0,
    sizes: Mapping[int, float] = SIZES,
    seed: int = 0,
) -> Jobs:
    """Jobs that request, in the long run, ``load`` of a cluster's GPUs.

    Args:
        count: jobs.
        load: the mean of GPUs × duration of a job, times arrivals a second, over the cluster's GPUs; above 1 the queue grows.
        median_s, sigma: of the log-normal durations; their mean is ``median_s · exp(sigma² / 2)``.
        sizes: GPUs of a job → share of jobs.
        seed: the same seed gives the same trace.

    Raises:
        ValueError: a number that is not above 0, or a cluster without GPUs.
    """
    for name, value in (
        ("count", count),
        ("load", load),
        ("median_s", median_s),
        ("the cluster's GPUs", cluster.total_gpus),
    ):
        if not value > 0:
            raise ValueError(f"generate: {name} is {value}; expected a number above 0")
    if sigma < 0 or not sizes or min(sizes.values()) < 0 or min(sizes) < 1:
        raise ValueError(
            f"generate: sigma is {sigma} and sizes are {dict(sizes)}; expected sigma ≥ 0, shares ≥ 0 of 1 GPU or more"
        )
    g = np.random.default_rng(seed)
    shares = np.array(list(sizes.values()), float) / sum(sizes.values())
    gpus = g.choice(np.array(list(sizes), np.int64), count, p=shares)
    duration = g.lognormal(np.log(median_s), sigma, count)
    each = (
        float((np.array(list(sizes)) * shares).sum()) * median_s * float(np.exp(sigma**2 / 2))
    )  # GPU-seconds of a job
    submit = np.cumsum(g.exponential(each / (load * cluster.total_gpus), count))
    jobs = Jobs(submit, duration, gpus)
    jobs.generated = True
    return jobs
