"""GPU clustering (after Gandiva, Xiao et al. 2018, as FGD's authors compare it, Weng et al. 2023): like to like."""

from weft.cluster.placement import Placement
from weft.cluster.placements.best_resources import largest


def score(piece, node, most):
    if piece.gpus == 0:
        return 0
    sizes, free = 0, 0
    for size in range(len(node.mix)):
        sizes += node.mix[size] > 0
    for g in range(node.gpus):
        free += node.milli[g]
    full = int(25 * (most[0, 1] - free) // most[0, 1])
    if node.mix[piece.size] > 0:
        return full + (75 if sizes == 1 else 50)
    return full + (25 if sizes == 0 else 0)


PLACEMENT = Placement(
    "gpu-clustering",
    score,
    "a node of pieces of the same size, then an idle one",
    detailed=True,
    context=largest,
    validated="17 openb lists of ten seeds, within 0.6 points",
)
