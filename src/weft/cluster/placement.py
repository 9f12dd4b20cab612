"""What a placement is, and how ties between equally good nodes are broken."""

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
        score: ``(piece, node) -> float`` or ``(piece, node, context) -> float``, higher is better; ``engine/node.py`` lists
            the fields of a piece and a node. Numba compiles it.
        meaning: one line.
        ties: the rule for equal scores that the policy is known by: ``lowest`` or ``highest`` node number, or ``random``.
        counted: nodes do not matter: any free GPUs anywhere will do.
        gpu: which GPU a share takes: the ``tightest`` that it fits, a ``random`` one, or by ``score``, which then returns
            ``(score, GPU)``.
        detailed: it reads ``node.milli`` or ``node.mix``.
        topology: how it uses racks: ``ANYWHERE``, not at all; ``PREFERRED``, it keeps a job's pieces together
            (``weft.cluster.reference.placing``); ``REQUIRED``, and a job of several pieces waits until it fits in one rack.
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


# ---- ties ------------------------------------------------------------------------------------------------------------


TIE_RULES = ("lowest", "highest", "random")


def check_ties(rule: str) -> str:
    if rule not in TIE_RULES:
        raise UnknownName("rule for ties", rule, TIE_RULES)
    return rule


def first_random_state(seed: int) -> int:
    return int(np.random.default_rng(seed).integers(1, 2**62))


def draw(state: int, n: int) -> tuple[int, int]:
    """The next state and a whole number under n (xorshift64*, Vigna 2016)."""
    x, mask = state, 2**64 - 1
    x ^= x >> 12
    x = (x ^ (x << 25)) & mask
    x ^= x >> 27
    return x, ((x * 2685821657736338717 & mask) >> 33) % n
