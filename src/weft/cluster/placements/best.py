"""Best fit: the node left with the fewest free GPUs."""

from weft.cluster.placement import Placement


def score(piece, node):
    return -(node.free_gpus - piece.gpus)


PLACEMENT = Placement("best", score, "the node left with the fewest free GPUs")
