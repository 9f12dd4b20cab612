"""What a placement is, and how they are found: every module of ``weft.cluster.placements`` that has a ``PLACEMENT``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.definition import UnknownName


@dataclass(frozen=True)
class Placement:
    """A rule for choosing a node.

    Args:
        name: what users call it.
        score: ``(piece, node) -> float``, higher is better; ``engine/index.py`` says what a piece and a node show. Numba
            compiles it.
        meaning: one line.
        ties: the rule for equal scores that the policy is known by: ``lowest`` or ``highest`` node number, or ``random``.
        counted: nodes do not matter: any free GPUs anywhere will do.
        validated: the published figures that were reproduced, and where; empty while there are none.
    """

    name: str
    score: Callable[..., float]
    meaning: str
    ties: str = "lowest"
    counted: bool = False
    validated: str = ""


def find(name: str) -> Placement:
    """The placement of that name.

    Raises:
        UnknownName: there is none.
    """
    from weft.cluster.placements import PLACEMENTS

    if name not in PLACEMENTS:
        raise UnknownName("placement", name, PLACEMENTS)
    return PLACEMENTS[name]
