"""Which bars a page holds, and which of them it shows first: as many as can be read."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.cluster.allocations import Allocations
from weft.cluster.model import Cluster
from weft.cluster.pictures import time_axis
from weft.drawing.quantities import figures
from weft.words import count

READABLE_BARS, READABLE_GPUS = 300, 64  # about what the window shows at first


@dataclass(frozen=True)
class Kept:
    """The rows of pieces that a page holds: all on the first ``nodes`` nodes that run between two times (seconds)."""

    rows: NDArray[np.int64]
    since: float
    until: float
    nodes: int


def bounded(pieces: Allocations, nodes: int, most: int) -> Kept:
    """At most ``most`` pieces without gaps between them.

    All of them, or all that touch the stretch of time in which the most begin, or where too many run at once those of the
    first nodes.
    """
    if len(pieces) <= most:
        return Kept(np.arange(len(pieces)), -np.inf, np.inf, nodes)
    since, ends = np.sort(pieces.start), np.sort(pieces.end)
    one_too_many = np.searchsorted(ends, since, side="right") + most  # those that ended by then make way for others
    until = np.append(since, np.inf)[np.minimum(one_too_many, len(since))]
    length = until - since
    some = np.flatnonzero(length > 0)
    if len(some):
        best = some[np.argmin(length[some])]
        inside = (pieces.start < until[best]) & (pieces.end > since[best])
        return Kept(np.flatnonzero(inside), float(since[best]), float(until[best]), nodes)
    first = int(np.searchsorted(np.cumsum(np.bincount(pieces.node)), most, side="right"))
    return Kept(np.flatnonzero(pieces.node < first), -np.inf, np.inf, first)


def describe(kept: Kept, pieces: Allocations, nodes: int, begin: float, end: float) -> str:
    """What the page holds, in words; nothing where that is all."""
    if len(kept.rows) == len(pieces):
        return ""
    name, length = time_axis.unit(end - begin)
    since, until = max(kept.since, begin), min(kept.until, end)
    found = f"{len(kept.rows):,} of {count(len(pieces), 'bar')}: "
    if kept.nodes < nodes:
        return found + f"those of the first {count(kept.nodes, 'node')}"
    return found + f"those from {figures((since - begin) / length)} to {figures((until - begin) / length)} {name}"


@dataclass(frozen=True)
class Blocks:
    """What the window moves by, K of them: nodes, and of nodes with more GPUs than can be read parts of them.

    Args:
        offset: the first GPU of each, counted over all nodes, [K + 1].
        node: whose, [K].
        base: the first GPU of each, counted in its node, [K].
    """

    offset: NDArray[np.int64]
    node: NDArray[np.int64]
    base: NDArray[np.int64]


def blocks(cluster: Cluster) -> Blocks:
    parts = np.maximum(-(-cluster.gpus // READABLE_GPUS), 1)
    node = np.repeat(np.arange(len(cluster)), parts)
    base = (np.arange(len(node)) - np.repeat(np.cumsum(parts) - parts, parts)) * READABLE_GPUS
    first = np.cumsum(cluster.gpus) - cluster.gpus
    return Blocks(np.append(first[node] + base, cluster.total_gpus), node, base)


def first_window(
    divided: Blocks, lane: NDArray[np.float64], start: NDArray[np.float64], begin: float, end: float
) -> tuple[tuple[int, int], float, float]:
    """The first block and how many, and from when to when: everything, or about as much of the densest as can be read.

    Args:
        lane, start: of the runs, by start: where they begin, in GPUs counted over all nodes, and seconds.
    """
    offset = divided.offset
    if len(lane) <= READABLE_BARS and offset[-1] <= 2 * READABLE_GPUS:
        return (0, len(offset) - 1), begin, end
    first = int(np.searchsorted(offset, lane.min(), side="right")) - 1 if len(lane) else 0
    shown = max(1, int(np.searchsorted(offset, offset[first] + READABLE_GPUS, side="right")) - 1 - first)
    starts = start[(lane >= offset[first]) & (lane < offset[first + shown])]
    if len(starts) <= READABLE_BARS:
        return (first, shown), begin, end
    at = int(np.argmin(starts[READABLE_BARS:] - starts[:-READABLE_BARS]))
    length = max(float(starts[at + READABLE_BARS] - starts[at]), (end - begin) / 1e5)
    return (first, shown), float(starts[at]), float(starts[at]) + length
