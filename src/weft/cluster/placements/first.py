"""First fit: the first node that fits, in the order of the cluster."""

from weft.cluster.placement import Placement


def score(piece, node):
    return 0.0


PLACEMENT = Placement("first", score, "the first node that fits, in the order of the cluster")
