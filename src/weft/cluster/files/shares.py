"""Parts of GPUs: MIG slices, time slices, fractions that jobs request."""

import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

NEITHER = "neither a share of one GPU nor whole GPUs"
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


def of_instances(
    each: NDArray[np.float64], instances: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """What a job of equal instances requests, where each has ``each`` GPUs.

    Returns:
        GPUs of the job, thousandths of each, and the rows that want neither a share of one GPU nor whole ones.
    """
    share = (each > 0) & (each < 1)
    milli = np.where(share, np.maximum(np.rint(each * 1000), 1), 1000)
    whole = np.floor(each)
    return np.where(share, 1, whole) * instances, milli, ~share & (each > whole)
