"""How a job without pods is cut into pieces: by the largest node that it accepts."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import WHOLE, Cluster, Jobs, accepts

REQUEST = ("gpus", "milli", "pods", "gpu_memory", "cpu", "memory", "types")  # jobs equal in these have the same request


def requests(jobs: Jobs) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The request of every job [J], and the first job with each request."""
    return _unique([getattr(jobs, name) for name in REQUEST], len(jobs))


def node_gpus(jobs: Jobs, rows: Iterable[int], cluster: Cluster) -> list[int]:
    """For each of these jobs the GPUs of the largest node that it accepts: of one of its types, with enough memory on
    each GPU, and when empty with enough cores and main memory for as many of its GPUs as the node has.

    Pieces never share a node. So where a larger node, which lacks cores or memory, could take two of the
    pieces, and where it accepts no node, the job is cut by the largest of its types and GPU memory all the same, and
    can never run.
    """
    columns = [getattr(cluster, name) for name in ("gpus", "gpu_type", "gpu_memory", "cpu", "memory")]
    _, first = _unique(columns, len(cluster))
    kinds = sorted(zip(*(column[first].tolist() for column in columns), strict=True), reverse=True)
    kinds = [kind for kind in kinds if kind[0]]
    largest = kinds[0][0] if kinds else 0
    suitable: dict[tuple[int, float], list[tuple[Any, ...]]] = {}
    sizes = []
    for j in rows:
        gpus, milli, pods, gpu_memory, cpu, memory, types = (getattr(jobs, name)[j].item() for name in REQUEST)
        if pods or gpus < 2 or milli < WHOLE or len(kinds) < 2:  # one piece, equal ones, or one kind of nodes
            sizes.append(largest)
            continue
        if (types, gpu_memory) not in suitable:
            wanted = jobs.type_sets[types]
            of_type = [kind for kind in kinds if accepts(wanted, cluster.types[kind[1]])]
            of_memory = [kind for kind in of_type if kind[2] < 0 or kind[2] >= gpu_memory]
            suitable[types, gpu_memory] = of_memory or of_type or kinds
        able = suitable[types, gpu_memory]
        requested = (gpus, cpu, memory)
        size = next((kind[0] for kind in able if _holds(kind, requested, min(kind[0], gpus))), able[0][0])
        shared = size < gpus and any(_holds(kind, requested, size, gpus % size or size) for kind in able)
        sizes.append(able[0][0] if shared else size)
    return sizes


def _holds(kind: tuple[Any, ...], requested: tuple[int, int, int], *parts: int) -> bool:
    """Whether an empty node of this kind can take pieces with so many of a job's GPUs."""
    has, (gpus, *rest) = (kind[3], kind[4]), requested
    needed = [sum(share(amount, part, gpus) for part in parts) for amount in rest]
    return kind[0] >= sum(parts) and all(there < 0 or there >= n for there, n in zip(has, needed, strict=True))


def share(amount: int, of: int, gpus: int) -> int:
    """What a piece gets with ``of`` of a job's GPUs: so much of its cores or memory, rounded up. In whole numbers: 9 /
    14 of 42 cores as a quotient were a thousandth more than 27."""
    return -(-amount * of // gpus)


def _unique(columns: list[NDArray[Any]], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Groups equal rows: the group of each row, and the first row of each group."""
    code = np.zeros(count, np.int64)
    for column in columns:
        if count and (column != column[0]).any():
            _, part = np.unique(column, return_inverse=True)
            _, code = np.unique(code * (part.max() + 1) + part, return_inverse=True)
    _, first, group = np.unique(code, return_index=True, return_inverse=True)
    return group.astype(np.int64), first
