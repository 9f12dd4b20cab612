"""First fit: the first node that fits, in the order of the cluster."""

from __future__ import annotations

from weft.cluster.placement import Placement


def score(piece, node):
    return 0.0


PLACEMENT = Placement("first", score, "the first node that fits, in the order of the cluster")
