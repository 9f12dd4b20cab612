"""Jobs by what they ask: classes of jobs with the same request, and the kinds of pieces that they are placed in."""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster import gangs
from weft.cluster.engine.node import PIECE
from weft.cluster.model import WHOLE, Cluster, Jobs, accepts, size_of

# A job is `count` pieces of kind `piece`, and one of kind `rest` (-1: none); `shared`: several of its pieces may lie on
# one node. `milli`: thousandths of GPUs of a job altogether. `begin`, `size`: its waiting jobs in the heap or tree;
# `first`, `jobs`: all its jobs by rank. `blocked`: known not to fit as things are. `of_type`, `of_memory`: the groups
# of nodes with a type that it accepts, and also with enough GPU memory; `bare`: its first piece without cores and
# memory. `least`: so many whole GPUs at least are free on a node that takes any of its pieces. `reason`: what it waits
# for, since `since`.
CLASS = np.dtype(
    [
        *(
            (name, "i8")
            for name in (
                "piece",
                "count",
                "rest",
                "milli",
                "begin",
                "size",
                "of_type",
                "of_memory",
                "bare",
                "reason",
                "first",
                "jobs",
                "least",
            )
        ),
        *((name, "?") for name in ("shared", "blocked")),
        ("since", "f8"),
    ]
)
MOST_GROUPS = 62


def classify(jobs: Jobs, cluster: Cluster) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """The class of every job [J], the classes, their kinds of pieces, and the groups of every node [N] as bits.

    A job without ``pods`` that asks more GPUs than the largest node has that it accepts comes in pieces of whole such
    nodes and one for the remainder (:mod:`weft.cluster.gangs`); its cores and memory are divided by GPUs. With ``pods``
    it comes in so many equal pieces. Shares of GPUs are not divided over nodes.
    """
    of_job, first = gangs.requests(jobs)
    kinds: dict[tuple[Any, ...], int] = {}
    groups: dict[bytes, int] = {np.ones(len(cluster), bool).tobytes(): 0}  # by which nodes they are; the first: all

    @functools.cache
    def group(mask: int, least: float) -> int:
        """Of the nodes with one of the types and so much GPU memory; requests that the same nodes fit have one."""
        fits = (mask >> cluster.gpu_type) & 1 > 0
        fits &= (least <= 0) | (cluster.gpu_memory < 0) | (cluster.gpu_memory >= least)
        return groups.setdefault(fits.tobytes(), len(groups))

    rows, where = [], []
    for j, largest in zip(first, gangs.node_gpus(jobs, first, cluster), strict=True):
        gpus, milli, pods, gpu_memory, cpu, memory, types = (getattr(jobs, name)[j].item() for name in gangs.REQUEST)
        mask = _mask(jobs.type_sets[types], cluster.types)
        alike = (milli, mask, gpu_memory, pods > 1 and gpus > pods and milli < WHOLE)

        def kind(g: int, part: int, parts: int, same: tuple[Any, ...] = alike, of: Any = (cpu, memory)) -> int:
            return kinds.setdefault((g, *same, *(gangs.share(amount, part, parts) for amount in of)), len(kinds))

        if pods:
            rows.append((kind(gpus // pods, 1, pods), pods, -1, True, gpus * milli))
        elif gpus <= largest or not largest or milli < WHOLE:
            rows.append((kind(gpus, 1, 1), 1, -1, False, gpus * milli))
        else:
            whole, rest = divmod(gpus, largest)
            rows.append(
                (kind(largest, largest, gpus), whole, kind(rest, rest, gpus) if rest else -1, False, gpus * milli)
            )
        each = kind(gpus // pods if pods else min(gpus, largest) if largest and milli == WHOLE else gpus, 0, 1)
        where.append((group(mask, 0.0), group(mask, gpu_memory), each))
    if len(groups) > MOST_GROUPS:
        raise ValueError(
            f"{len(groups)} sets of nodes differ in which jobs' GPU types and memory they have; expected at most {MOST_GROUPS}"
        )
    classes = np.zeros(len(rows), CLASS)
    for column, name in enumerate(("piece", "count", "rest", "shared", "milli")):
        classes[name] = [row[column] for row in rows]
    for column, name in enumerate(("of_type", "of_memory", "bare")):
        classes[name] = [row[column] for row in where]
    members = np.zeros(len(cluster), np.int64)
    for fits, number in groups.items():
        members |= np.frombuffer(fits, bool).astype(np.int64) << number
    pieces = np.zeros(len(kinds), PIECE)
    for column, name in enumerate(("gpus", "milli", "types", "gpu_memory", "spread", "cpu", "memory")):
        pieces[name] = [kind[column] for kind in kinds]
    pieces["size"] = [size_of(kind[0], kind[1]) for kind in kinds]
    pieces["counted"] = ~np.isin(np.arange(len(kinds)), [row[column] for row in rows for column in (0, 2)])
    pieces["read"] = -1
    whole = np.where(pieces["milli"] == WHOLE, pieces["gpus"], 0)
    last = np.where(classes["rest"] >= 0, classes["rest"], classes["piece"])
    classes["least"] = np.minimum(whole[classes["piece"]], whole[last])
    return of_job, classes, pieces, members


def _mask(accepted: tuple[str, ...], types: tuple[str, ...]) -> int:
    """A bit for each of the cluster's types that is accepted; all of them where nothing is named."""
    return sum(1 << i for i, name in enumerate(types) if accepts(accepted, name))
