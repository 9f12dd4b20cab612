"""Parts of GPUs: MIG slices, time slices, shards."""

import math
from collections.abc import Mapping
from fractions import Fraction

SEVENTHS = 7  # of compute, which a GPU with MIG has


def of_mig(sevenths: str | int) -> Fraction:
    """The share of a GPU that a slice is, whose profile begins with this number: ``3g.20gb`` is 3 / 7."""
    return Fraction(min(int(sevenths), SEVENTHS), SEVENTHS)


def gpus_holding(parts: Mapping[Fraction, int]) -> int:
    """How many GPUs are cut into these parts.

    Args:
        parts: size, of which none is 0 → how many.
    """
    together = math.ceil(sum(size * count for size, count in parts.items()))
    return max([together, *(math.ceil(count / (1 // size)) for size, count in parts.items())])
