"""Counted: any free GPUs anywhere will do, the way many published simulators count."""

from weft.cluster.placement import Placement


def score(piece, node):
    return 0.0


PLACEMENT = Placement(
    "counted",
    score,
    "any free GPUs anywhere",
    counted=True,
    validated="Tiresias' and Muri's traces, strict and skip FIFO",
)
