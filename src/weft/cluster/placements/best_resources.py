"""Best fit over cores and GPUs together, as FGD's authors compare it (Weng et al. 2023): the least left of both."""

import math

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import WHOLE, Cluster, Jobs
from weft.cluster.placement import Placement


def largest(jobs: Jobs, cluster: Cluster) -> NDArray[np.float64]:
    """[1, 2]: the most cores (in thousandths) and GPUs (likewise) that any node has, at least 1 of each."""
    return np.array(
        [[max(cluster.cpu.max(initial=0), 1), max(cluster.gpus.max(initial=0), 1) * WHOLE]], dtype=np.float64
    )


def score(piece, node, most):
    free = 0
    for g in range(node.gpus):
        free += node.milli[g]
    cpu = (node.free_cpu - piece.cpu) / most[0, 0] if node.cpu >= 0 else 0.0
    gpu = (free - piece.gpus * piece.milli) / most[0, 1]
    return math.floor(100 * (1 - (cpu / 2 + gpu / 2)))


PLACEMENT = Placement(
    "best-resources",
    score,
    "the node left with the least of cores and GPUs together",
    detailed=True,
    context=largest,
    validated="the golden arrivals on openb default; five lists of ten seeds",
)
