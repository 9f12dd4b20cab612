"""Distributions of positive quantities in a profile (seconds, or estimate over duration)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS = 100  # of a fitted quantile curve, besides those of its tail


@dataclass(frozen=True)
class LogNormal:
    """Its logarithm is normal; the mean is ``median · exp(sigma² / 2)``."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        if not (0 < self.median < math.inf and 0 <= self.sigma <= 10):
            raise ValueError(
                f"log-normal: median is {self.median} and sigma is {self.sigma}; expected a median above 0, a sigma of 0 to 10"
            )

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    def at(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values for standard normal numbers, [n] → [n]."""
        return self.median * np.exp(self.sigma * z)


@dataclass(frozen=True)
class Quantiles:
    """Values at stated probabilities, both ascending; between them the logarithm of 1 + value is a straight line (so that 0 has
    a place), before the first and after the last the value is constant."""

    probabilities: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        p, v = self.probabilities, self.values
        if not p or len(p) != len(v):
            raise ValueError(
                f"quantiles: {len(p)} probabilities and {len(v)} values; expected as many, and at least one"
            )
        for name, row, most in (("probabilities", p, 1.0), ("values", v, math.inf)):
            if list(row) != sorted(row) or not 0 <= row[0] <= row[-1] <= most or not math.isfinite(row[-1]):
                raise ValueError(
                    f"quantiles: {name} begin {list(row[:5])}; expected ascending numbers from 0 to {most}"
                )

    @classmethod
    def of(cls, sample: NDArray[np.float64]) -> "Quantiles":
        """The curve of a sample (Hazen's quantiles): all its values up to 100 of them, else 100 points, and among the largest
        also the 1st, 2nd, 4th, 5th, 8th, 11th, 16th …: few jobs of a real trace are most of its GPU hours."""
        n = len(sample)
        p = (np.arange(min(n, POINTS)) + 0.5) / min(n, POINTS)
        if n > POINTS:
            largest = np.unique((2 ** np.arange(0, np.log2(n / POINTS) + 1, 0.5)).astype(np.int64))
            p = np.unique(np.concatenate((p, 1 - (largest - 0.5) / n)))
        values = np.quantile(sample, p, method="hazen")
        return cls(tuple(np.round(p, 9).tolist()), tuple(np.round(values, 3).tolist()))

    @property
    def mean(self) -> float:
        p, v = np.array(self.probabilities), np.array(self.values)
        low, high = 1 + v[:-1], 1 + v[1:]
        grows = high > low * (1 + 1e-9)
        between = np.where(grows, (high - low) / np.log(np.where(grows, high / low, np.e)), low) - 1
        return float(p[0] * v[0] + (np.diff(p) * between).sum() + (1 - p[-1]) * v[-1])

    def at(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values for standard normal numbers, [n] → [n]."""
        return np.expm1(np.interp(normal_probability(z), self.probabilities, np.log1p(self.values)))


Quantity = LogNormal | Quantiles
_erf = np.frompyfunc(math.erf, 1, 1)  # NumPy has none


def normal_probability(z: NDArray[np.float64]) -> NDArray[Any]:
    return 0.5 + 0.5 * np.asarray(_erf(z / math.sqrt(2)), np.float64)
