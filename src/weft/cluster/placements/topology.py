"""Topology-aware: a job's pieces in one NVLink domain, else in one rack, else in few; the fullest that fit."""

from weft.cluster.placement import PREFERRED, Placement
from weft.cluster.placements.best import score

PLACEMENT = Placement(
    "topology", score, "as few racks as possible, the fullest that fit; in them best fit", topology=PREFERRED
)
