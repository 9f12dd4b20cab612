"""Topology-aware, and a job of several pieces waits until all of them fit in one rack (``required`` in Kueue)."""

from weft.cluster.placement import REQUIRED, Placement
from weft.cluster.placements.best import score

PLACEMENT = Placement(
    "topology-required", score, "topology; what comes in several pieces never leaves a rack", topology=REQUIRED
)
