"""Consolidate (Helios, Hu et al. 2021): the node with the fewest free GPUs that fits; more than a node on whole free nodes."""

from weft.cluster.placement import Placement


def score(piece, node):
    return -node.free_gpus


PLACEMENT = Placement(
    "consolidate", score, "as few nodes as possible, the fullest that fit", validated="Helios' vcvGl, FIFO and SJF"
)
