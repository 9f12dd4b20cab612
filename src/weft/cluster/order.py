"""What an order is, and how they are found: every module of ``weft.cluster.orders`` that has an ``ORDER``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import Jobs
from weft.definition import UnknownName


@dataclass(frozen=True)
class Order:
    """A queue's order.

    Args:
        name: what users call it. ``NAME-skip`` is the same order with everyone who fits passing those who do not.
        keys: ``(jobs) -> columns``, the first one most important, small values first; equal ones by submission.
        meaning: one line.
        validated: the end of the name (one of MODES) → the published figures that were reproduced.
    """

    name: str
    keys: Callable[[Jobs], tuple[NDArray[Any], ...]]
    meaning: str
    validated: Mapping[str, str] = field(default_factory=dict)

    def rank(self, jobs: Jobs) -> NDArray[np.int32]:
        """Each job's position, [J]; jobs are in order of submission, which settles what the keys leave equal."""
        keys = self.keys(jobs)
        rank = np.empty(len(jobs), np.int32)
        order = np.lexsort(keys[::-1]) if keys else np.arange(len(jobs))
        rank[order] = np.arange(len(jobs), dtype=np.int32)
        return rank


MODES = {
    "": "the head waits and nobody passes it",
    "-skip": "everyone who fits may pass",
    "-easy": "who does not delay the head, by its estimate, may pass (EASY backfill)",
    "-conservative": "who delays nobody before it, by its estimate, may pass (conservative backfill)",
}


def find(name: str) -> tuple[Order, str]:
    """The order, and who may pass: one of MODES, the end of the name.

    Raises:
        UnknownName: there is none.
    """
    from weft.cluster.orders import ORDERS

    mode = next((end for end in MODES if end and name.endswith(end)), "")
    base = name.removesuffix(mode)
    if base not in ORDERS:
        raise UnknownName("order", name, [f"{order}{end}" for end in MODES for order in ORDERS])
    return ORDERS[base], mode
