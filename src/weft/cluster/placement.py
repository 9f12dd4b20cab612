"""What a placement is, and how they are found: every module of ``weft.cluster.placements`` that has a ``PLACEMENT``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import Cluster, Jobs
from weft.definition import UnknownName

TIGHTEST = "tightest"
ANYWHERE, PREFERRED, REQUIRED = range(3)  # what racks are to a placement
NOTHING = np.zeros((0, 0))


def no_context(jobs: Jobs, cluster: Cluster) -> NDArray[np.float64]:
    return NOTHING


@dataclass(frozen=True)
class Placement:
    """A rule for choosing a node, and a GPU of it for a share.

    Args:
        name: what users call it.
        score: ``(piece, node) -> float`` or ``(piece, node, context) -> float``, higher is better; ``engine/node.py`` says
            what a piece and a node show. Numba compiles it.
        meaning: one line.
        ties: the rule for equal scores that the policy is known by: ``lowest`` or ``highest`` node number, or ``random``.
        counted: nodes do not matter: any free GPUs anywhere will do.
        gpu: which GPU a share takes: the ``tightest`` that has room, a ``random`` one, or by ``score``, which then returns
            ``(score, GPU)``.
        detailed: it looks at ``node.milli`` or ``node.mix``.
        topology: what racks are to it: ``ANYWHERE``, nothing; ``PREFERRED``, it keeps a job's pieces together
            (``weft.cluster.topology``); ``REQUIRED``, and a job of several waits until one rack has room.
        context: ``(jobs, cluster) -> [rows, columns]``: what the score knows of the whole trace and the empty cluster.
        validated: the published figures that were reproduced, and where; empty while there are none.
    """

    name: str
    score: Callable[..., Any]
    meaning: str
    ties: str = "lowest"
    counted: bool = False
    gpu: str = TIGHTEST
    detailed: bool = False
    topology: int = ANYWHERE
    context: Callable[[Jobs, Cluster], NDArray[np.float64]] = no_context
    validated: str = ""


def find(name: str) -> Placement:
    """The placement of that name.

    Raises:
        UnknownName: there is none.
        ValueError: the path of a file.
    """
    from weft.cluster.placements import PLACEMENTS

    if name.endswith(".py"):
        raise ValueError(
            f"placement '{name}': what Numba compiles into the engine must lie in weft/cluster/placements, and goes by the "
            "name of its PLACEMENT; only an order may be a file elsewhere"
        )
    if name not in PLACEMENTS:
        raise UnknownName("placement", name, PLACEMENTS)
    return PLACEMENTS[name]
