"""Dot product (after Tetris, Grandl et al. 2014, as FGD's authors compare it, Weng et al. 2023): the node with the least of
what the piece requests most."""

import math

from weft.cluster.placement import Placement
from weft.cluster.placements.best_resources import largest


def score(piece, node, most):
    free = 0
    for g in range(node.gpus):
        free += node.milli[g]
    cpu = node.free_cpu / most[0, 0] * (piece.cpu / most[0, 0]) if node.cpu >= 0 else 0.0
    gpu = free / most[0, 1] * (piece.gpus * piece.milli / most[0, 1])
    return math.floor(100 * (1 - (cpu + gpu) / 2))


PLACEMENT = Placement(
    "dot-product",
    score,
    "the node with the least of what the piece requests most",
    detailed=True,
    context=largest,
    validated="17 openb lists of ten seeds, within 0.6 points",
)
