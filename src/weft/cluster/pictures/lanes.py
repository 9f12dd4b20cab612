"""Which GPUs of a node a job sits on.

A simulation counts the GPUs of a node and does not name them. Pictures need names, so each piece takes the lowest free ones
when it starts; completions of a moment come before its starts, and starts in the order of jobs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.cluster.pieces import Pieces


@dataclass(frozen=True)
class Runs:
    """Neighbouring GPUs of a node that a piece holds, columns of length R: GPUs ``first`` to ``first + count - 1``."""

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]


def lanes(pieces: Pieces, capacity: NDArray[np.int64]) -> Runs:
    """A run or several for each piece, by start.

    Args:
        pieces: all that ever ran on their nodes, so that what is free is known.
        capacity: GPUs of each node, [N].

    Raises:
        ValueError: a node gave more GPUs at once than it has.
    """
    count = len(pieces)
    time = np.concatenate((pieces.end, pieces.start))
    order = np.argsort(time, kind="stable").tolist()  # completions stand first, so they come first of a moment
    node, gpus = pieces.node.tolist(), pieces.gpus.tolist()
    free = [(1 << int(c)) - 1 for c in capacity]  # a bit for each free GPU
    held = [0] * count
    found: list[tuple[int, int, int]] = []
    for event in order:
        if event < count:
            free[node[event]] |= held[event]
            continue
        piece = event - count
        bits, left, taken = free[node[piece]], gpus[piece], 0
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
            found.append((piece, first, run))
            bits, taken, left = bits & ~mask, taken | mask, left - run
        free[node[piece]], held[piece] = bits, taken
    return Runs(*np.array(found, np.int64).reshape(-1, 3).T)
