"""Which GPUs of a node a job sits on, and which part of each.

Where a placement chooses GPUs, the simulation names them. Elsewhere it counts a node's GPUs, and since pictures need
numbers each piece takes the lowest free ones when it starts; a share takes the lowest free part of its GPU. Completions
of one time come before its starts, and starts in the order of jobs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.cluster.allocations import Allocations
from weft.cluster.model import WHOLE


@dataclass(frozen=True)
class Runs:
    """What a piece holds of neighbouring GPUs of a node, columns of length R: from ``first``, ``count`` of them, both in
    parts of a GPU, of which each has ``unit``: 1, or 1000 where there are shares."""

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]
    unit: int


def lanes(pieces: Allocations, capacity: NDArray[np.int64]) -> Runs:
    """A run or several for each piece, by start.

    Args:
        pieces: all that ever ran on their nodes, so that what is free is known.
        capacity: GPUs of each node, [N].

    Raises:
        ValueError: a node gave more GPUs at once than it has.
    """
    count = len(pieces)
    unit = WHOLE if (pieces.milli != WHOLE * pieces.gpus).any() else 1
    time = np.concatenate((pieces.end, pieces.start))
    order = np.argsort(time, kind="stable").tolist()  # completions are first, so they come first at one time
    node, gpus, on = pieces.node.tolist(), pieces.gpus.tolist(), pieces.on.tolist()
    parts = (pieces.milli * unit // WHOLE).tolist()
    free = [(1 << int(c) * unit) - 1 for c in capacity]  # a bit for each free part
    held = [0] * count
    found: list[tuple[int, int, int]] = []
    for event in order:
        if event < count:
            free[node[event]] |= held[event]
            continue
        piece = event - count
        if on[piece]:  # of each GPU that it is on, the same
            chosen = [gpu for gpu in range(on[piece].bit_length()) if on[piece] >> gpu & 1]
            requested = [(((1 << unit) - 1) << gpu * unit, parts[piece] // gpus[piece]) for gpu in chosen]
        else:
            requested = [(-1, parts[piece])]
        taken, begun = 0, len(found)
        for within, left in requested:
            bits = free[node[piece]] & within
            while left:
                if not bits:
                    raise ValueError(
                        f"node {node[piece]} has {int(capacity[node[piece]])} GPUs and gave more at once to job "
                        f"{int(pieces.job[piece])}; expected a schedule without overlaps"
                    )
                first = (bits & -bits).bit_length() - 1
                above = bits >> first
                run = min(left, (~above & (above + 1)).bit_length() - 1)
                mask = ((1 << run) - 1) << first
                if len(found) > begun and sum(found[-1][1:]) == first:  # the next GPU, from its begin
                    found[-1] = (piece, found[-1][1], found[-1][2] + run)
                else:
                    found.append((piece, first, run))
                bits, taken, left = bits & ~mask, taken | mask, left - run
        free[node[piece]] &= ~taken
        held[piece] = taken
    columns = np.array(found, np.int64).reshape(-1, 3).T
    return Runs(columns[0], columns[1], columns[2], unit)
