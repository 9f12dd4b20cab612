"""Two-dimensional Gittins index as Tiresias uses it (Gu et al., NSDI 2019): of the jobs of a level first the one whose chance
of ending soon is the best for what it costs, by how much GPU time jobs of the trace (or of a history) take.

With sizes of jobs in GPU seconds, a job that has had a, and a quantum Δ: among the jobs larger than a, p is the share that ends
by a + Δ, and e their mean size, where one that does not counts as Δ; the index is p / e. Sizes are whole as in Tiresias' public
simulator; with what is remaining of them, size − a, it would be Gittins' own index.
"""

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import WHOLE, Jobs
from weft.cluster.order import FREE, KNOWN, Order, Preemption
from weft.cluster.orders.las import LEVELS

QUANTUM = LEVELS[0]
SCALE = 1e6  # the public simulator's, as is its rounding, which decides what is equal


def indices(jobs: Jobs) -> NDArray[np.float64]:
    """Sizes and the index of a job that has had almost as much, one after the other, by size; [2 × sizes]."""
    size = np.sort(jobs.gpus * jobs.milli / WHOLE * jobs.duration)
    size = size[size > 0]
    n = len(size)
    had = size - 1
    first = np.searchsorted(size, had, side="right")
    last = np.where(had + QUANTUM > size[-1:] - 1, n - 1, np.searchsorted(size, had + QUANTUM, side="right"))
    total = np.concatenate(([0.0], np.cumsum(size)))
    p = np.round((last - first) / (n - first), 5)
    e = np.round((total[np.maximum(last, first)] - total[first] + QUANTUM * (n - last)) / (n - first), 5)
    index = np.where(e > 0, np.round(SCALE * p / np.where(e > 0, e, 1), 4), 0.0)
    return np.stack([size, index], axis=1).ravel()


def index_in_level(job, remaining, served, known):
    had = served * job.gpus
    low, high = 0, (len(known) - KNOWN) // 2  # the first size above what it has had
    while low < high:
        middle = (low + high) // 2
        if known[KNOWN + 2 * middle] > had:
            high = middle
        else:
            low = middle + 1
    index = known[KNOWN + 2 * low + 1] if KNOWN + 2 * low < len(known) else 0.0
    return job.level * 2.0**32 - index


ORDER = Order(
    "2d-gittins",
    lambda jobs: (),
    "in levels the best chance of ending soon first, preempting others",
    validated={"": "Tiresias' simulator on its own and a Philly trace"},
    preemption=Preemption(index_in_level, FREE, LEVELS, by_gpus=True, equals=True, context=indices),
)
