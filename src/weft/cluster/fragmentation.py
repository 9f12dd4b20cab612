"""What is free at a time, and which typical pods could use it (Weng et al., USENIX ATC 2023, section 3)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import MOST_SHARED, WHOLE, Jobs
from weft.cluster.placements.fgd import CPU, GPUS, MILLI, SHARE, TYPES, typical
from weft.cluster.result import Result


def free_at(result: Result, now: float = np.inf) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Thousandths free of each GPU [N, 16] (0 where a node has fewer) and of cores [N] (-1: not known), right after
    what happened at ``now``; by default after the last start.

    Raises:
        ValueError: the run did not keep which GPUs it took.
    """
    jobs, cluster, held = result.jobs, result.cluster, result.stretches
    if not len(result.stretches.on):
        raise ValueError(
            f"placement '{result.placement}' on whole GPUs keeps no single GPUs; expected a detailed run, such as fgd's"
        )
    if now == np.inf:
        now = float(np.nanmax(held.begin, initial=0.0))
    gpus = np.where(np.arange(MOST_SHARED) < cluster.gpus[:, None], WHOLE, 0)
    cpu = cluster.cpu.copy()
    pieces = np.diff(held.slot)
    for k in np.flatnonzero((held.begin <= now) & (held.end > now)):
        j, slots = held.job[k], slice(held.slot[k], held.slot[k + 1])
        on = held.on[slots, None] >> np.arange(MOST_SHARED) & 1
        np.subtract.at(gpus, held.where[slots], on * jobs.milli[j])
        each = (
            -(-jobs.cpu[j] // pieces[k])
            if pieces[k] == 1 or jobs.pods[j]
            else -(-jobs.cpu[j] * on.sum(1) // jobs.gpus[j])
        )
        np.subtract.at(cpu, held.where[slots], each)
    return gpus, np.where(cluster.cpu < 0, -1, cpu)


def fragmentation(result: Result, history: Jobs | None = None, now: float = np.inf) -> NDArray[np.float64]:
    """Of each node [N], the thousandths of free GPUs that a typical pod cannot use, in the mean over typical pods.

    Args:
        history: the jobs whose requests are typical; the result's own by default.
        now: the time, as for :func:`free_at`.
    """
    gpus, cpu = free_at(result, now)
    pods = typical(history or result.jobs, result.cluster)
    total = gpus.sum(1)
    lost = np.zeros(len(total))
    for pod in pods:
        wanted: Any = pod[MILLI]
        small = np.where(gpus < wanted, gpus, 0).sum(1)
        able = ((gpus >= wanted) & (np.arange(MOST_SHARED) < result.cluster.gpus[:, None])).sum(1) >= pod[GPUS]
        able &= (cpu < 0) | (cpu >= pod[CPU])
        able &= int(pod[TYPES]) >> result.cluster.gpu_type & 1 > 0
        lost += pod[SHARE] * np.where(able & (wanted > 0), small, total)
    return lost
