"""Jobs by what they ask: classes of jobs with the same request, and the kinds of pieces that they are placed in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.engine.index import PIECE
from weft.cluster.model import Cluster, Jobs

# A job is `count` pieces of kind `piece`, and one of kind `rest` (-1: none); `shared`: several of its pieces may lie on one
# node. `gpus`: of a job altogether. `begin`, `size`: its waiting jobs in the heap. `blocked`: known not to fit as things are.
CLASS = np.dtype(
    [
        *((name, "i8") for name in ("piece", "count", "rest", "gpus", "begin", "size")),
        *((name, "?") for name in ("shared", "blocked")),
    ]
)


def classify(jobs: Jobs, cluster: Cluster) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """The class of every job [J], the classes, and their kinds of pieces.

    A job without ``pods`` that asks more GPUs than the largest node has comes in pieces of whole largest nodes and one for
    the remainder; its cores and memory are divided by GPUs. With ``pods`` it comes in so many equal pieces.
    """
    largest = int(cluster.gpus.max(initial=0))
    columns = ("gpus", "pods", "gpu_memory", "cpu", "memory", "types")
    of_job, first = _unique([getattr(jobs, name) for name in columns], len(jobs))
    kinds: dict[tuple[Any, ...], int] = {}
    rows = []
    for j in first:
        gpus, pods, gpu_memory, cpu, memory, types = (getattr(jobs, name)[j].item() for name in columns)
        mask = _mask(jobs.type_sets[types], cluster.types)

        def kind(
            g: int, share: float, mask: int = mask, gpu_memory: float = gpu_memory, cpu: int = cpu, memory: int = memory
        ) -> int:
            key = (g, mask, gpu_memory, -int(-cpu * share // 1), -int(-memory * share // 1))
            return kinds.setdefault(key, len(kinds))

        if pods:
            rows.append((kind(gpus // pods, 1 / pods), pods, -1, True, gpus))
        elif gpus <= largest or not largest:
            rows.append((kind(gpus, 1.0), 1, -1, False, gpus))
        else:
            whole, rest = divmod(gpus, largest)
            rows.append((kind(largest, largest / gpus), whole, kind(rest, rest / gpus) if rest else -1, False, gpus))
    classes = np.zeros(len(rows), CLASS)
    for column, name in enumerate(("piece", "count", "rest", "shared", "gpus")):
        classes[name] = [row[column] for row in rows]
    pieces = np.zeros(len(kinds), PIECE)
    for column, name in enumerate(("gpus", "types", "gpu_memory", "cpu", "memory")):
        pieces[name] = [kind[column] for kind in kinds]
    pieces["read"] = -1
    return of_job, classes, pieces


def _unique(columns: list[NDArray[Any]], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Groups equal rows: the group of each row, and the first row of each group."""
    code = np.zeros(count, np.int64)
    for column in columns:
        if count and (column != column[0]).any():
            _, part = np.unique(column, return_inverse=True)
            _, code = np.unique(code * (part.max() + 1) + part, return_inverse=True)
    _, first, group = np.unique(code, return_index=True, return_inverse=True)
    return group.astype(np.int64), first


def _mask(accepted: tuple[str, ...], types: tuple[str, ...]) -> int:
    """A bit for each of the cluster's types that is accepted; all of them where nothing is named."""
    return sum(1 << i for i, name in enumerate(types) if not accepted or name in accepted)
