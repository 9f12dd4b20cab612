"""How full each group of nodes was, over time: the overview where there are too many jobs to draw each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.cluster.allocations import Allocations
from weft.cluster.model import WHOLE

MOST_ROWS, COLUMNS = 64, 320


@dataclass(frozen=True)
class Heat:
    """``share`` [R, C] of the GPUs of ``nodes_each`` neighbouring nodes that were allocated, over each stretch of time."""

    share: NDArray[np.float64]
    nodes_each: int


def heat(pieces: Allocations, capacity: NDArray[np.int64], begin: float, end: float) -> Heat:
    """The mean over each column's time. A group without GPUs counts as idle.

    Args:
        capacity: GPUs of each node, [N].
        begin, end: seconds between which the columns lie.
    """
    each = -(-len(capacity) // MOST_ROWS)
    rows = -(-len(capacity) // each)
    gpus = np.bincount(np.arange(len(capacity)) // each, weights=capacity, minlength=rows)
    width = (end - begin) / COLUMNS
    time = np.clip(np.concatenate((pieces.start, pieces.end)), begin, end) - begin
    change = np.concatenate((pieces.milli, -pieces.milli)) / WHOLE
    cell = np.concatenate((pieces.node, pieces.node)) // each * (COLUMNS + 1)
    column = np.minimum(time // width, COLUMNS - 1).astype(np.int64)
    # A change adds to its own column from its time on, and to every later column in full.
    size = rows * (COLUMNS + 1)
    own = np.bincount(cell + column, weights=change * ((column + 1) * width - time), minlength=size)
    later = np.bincount(cell + column + 1, weights=change * width, minlength=size)
    held = own.reshape(rows, -1) + np.cumsum(later.reshape(rows, -1), axis=1)
    share = held[:, :COLUMNS] / np.maximum(gpus, 1)[:, None] / width
    return Heat(np.clip(share, 0.0, 1.0), each)  # rounding alone leaves that range
