"""Random fit: any node that fits, each as likely."""

from weft.cluster.placement import Placement


def score(piece, node):
    return 0.0


PLACEMENT = Placement(
    "random",
    score,
    "any node that fits, each as likely",
    ties="random",
    gpu="random",
    validated="five openb lists of ten seeds",
)
