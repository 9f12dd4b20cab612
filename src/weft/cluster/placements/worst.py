"""Worst fit: the node with the most free GPUs."""

from weft.cluster.placement import Placement


def score(piece, node):
    return node.free_gpus


PLACEMENT = Placement("worst", score, "the node with the most free GPUs")
