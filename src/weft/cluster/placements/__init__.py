"""Placements: which of the nodes that a piece of a job fits on gets it. One file each.

A placement is a scoring function (the *score* plug-in of the Kubernetes scheduling framework), compiled and called inside
the event loop: the fitting node with the highest score wins, ties go by the rule for ties::

    from weft.cluster.placement import Placement

    def fewest_free(piece, node):
        return -node.free_gpus

    PLACEMENT = Placement("best", fewest_free, "the node with the fewest free GPUs")
"""

from weft.cluster.plugins import discover

PLACEMENTS = discover(__name__, "PLACEMENT")
