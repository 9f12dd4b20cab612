"""The alpha-beta model of a collective: time = alpha + beta x bytes, fitted by stretches of sizes.

A library changes its protocol and algorithm with the size (NCCL: LL, LL128, Simple; ring, tree), so that one line through
all sizes is wrong in the middle. A stretch is added where the Bayesian information criterion pays for it. Errors are
relative: a small message counts as much as a large one. (R. Hockney, "The communication challenge for MPP", 1994, for
the model and n_1/2.)
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEAST_POINTS = 3  # of a stretch
MOST_STRETCHES = 4
FLOOR = 1e-3  # relative error that no measurement is better than
# Student's t, 97.5 %, by degrees of freedom
T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Stretch:
    """``alpha_us`` + ``beta_us`` x bytes between two sizes; ``…_error`` is half of the 95 % interval (None: two points)."""

    least_bytes: int
    most_bytes: int
    alpha_us: float
    beta_us: float  # per byte
    alpha_error: float | None
    beta_error: float | None

    def at(self, size: float) -> float:
        return self.alpha_us + self.beta_us * size


@dataclass(frozen=True)
class AlphaBeta:
    """A fitted model. ``unseen_median`` and ``unseen_max``: relative errors when each size but the least and the greatest is
    predicted from a fit without it."""

    stretches: tuple[Stretch, ...]
    unseen_median: float | None
    unseen_max: float | None

    def predict(self, size: float) -> float:
        """Microseconds for so many bytes."""
        i = bisect.bisect_right([s.least_bytes for s in self.stretches[1:]], size)
        s = self.stretches[i]
        if size > s.most_bytes and i + 1 < len(self.stretches):  # between two stretches: along a line in log-log
            after = self.stretches[i + 1]
            share = math.log(size / s.most_bytes) / math.log(after.least_bytes / s.most_bytes)
            return s.at(s.most_bytes) ** (1 - share) * after.at(after.least_bytes) ** share
        return s.at(size)

    @property
    def alpha_us(self) -> float:
        """The latency: of the smallest sizes."""
        return self.stretches[0].alpha_us

    @property
    def gb_s(self) -> float:
        """The algorithm bandwidth (1e9 bytes/s) of the largest sizes; infinite where time does not grow."""
        beta = self.stretches[-1].beta_us
        return 1e-3 / beta if beta > 0 else math.inf

    @property
    def bandwidth_from(self) -> int | None:
        """n_1/2: the least measured-range size that runs at half of that bandwidth; None where none does."""
        size, most = float(self.stretches[0].least_bytes), self.stretches[-1].most_bytes
        while size <= most:
            if size / self.predict(size) / 1e3 >= self.gb_s / 2:
                return round(size)
            size *= 2**0.125
        return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"alpha_us": self.alpha_us, "gb_s": self.gb_s, "bandwidth_from": self.bandwidth_from}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "AlphaBeta":
        return cls(tuple(Stretch(**s) for s in data["stretches"]), data["unseen_median"], data["unseen_max"])


def fit(sizes: Sequence[int], times_us: Sequence[float]) -> AlphaBeta:
    """The model of measured times.

    Raises:
        ValueError: fewer than three sizes, or times that are not above 0.
    """
    points = sorted(zip(sizes, times_us, strict=True))
    if len(points) < LEAST_POINTS or any(t <= 0 for _, t in points):
        raise ValueError(f"{len(points)} sizes; expected {LEAST_POINTS} or more, with times above 0")
    unseen = []
    for i in range(1, len(points) - 1):
        if len(points) > LEAST_POINTS:
            size, time = points[i]
            unseen.append(abs(AlphaBeta(_stretches(points[:i] + points[i + 1 :]), None, None).predict(size) / time - 1))
    unseen.sort()
    return AlphaBeta(_stretches(points), unseen[len(unseen) // 2] if unseen else None, unseen[-1] if unseen else None)


def _stretches(points: list[tuple[int, float]]) -> tuple[Stretch, ...]:
    n = len(points)
    lines = {(i, j): _line(points[i:j]) for i in range(n) for j in range(i + LEAST_POINTS, n + 1)}
    # best[k][j]: (error, stretches) of the first j points in k stretches
    best: list[dict[int, tuple[float, tuple[tuple[int, int], ...]]]] = [{0: (0.0, ())}]
    for _ in range(min(MOST_STRETCHES, n // LEAST_POINTS)):
        row: dict[int, tuple[float, tuple[tuple[int, int], ...]]] = {}
        for (i, j), (_, _, error) in lines.items():
            if i in best[-1]:
                before, cut = best[-1][i]
                if j not in row or before + error < row[j][0]:
                    row[j] = (before + error, (*cut, (i, j)))
        best.append(row)

    def criterion(k: int) -> float:
        return n * math.log(max(best[k][n][0] / n, FLOOR**2)) + (3 * k - 1) * math.log(n)

    k = min((k for k in range(1, len(best)) if n in best[k]), key=criterion)
    return tuple(_stretch(points[i:j]) for i, j in best[k][n][1])


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """alpha, beta and the sum of squared relative errors; neither is negative."""
    w = [1 / (t * t) for _, t in points]
    sw = sum(w)
    sx = sum(a * s for a, (s, _) in zip(w, points, strict=True))
    st = sum(a * t for a, (_, t) in zip(w, points, strict=True))
    sxx = sum(a * s * s for a, (s, _) in zip(w, points, strict=True))
    sxt = sum(a * s * t for a, (s, t) in zip(w, points, strict=True))
    det = sw * sxx - sx * sx
    beta = (sw * sxt - sx * st) / det if det > 0 else 0.0
    alpha = (st - beta * sx) / sw
    if beta < 0:
        alpha, beta = st / sw, 0.0
    if alpha < 0:
        alpha, beta = 0.0, sxt / sxx
    return alpha, beta, sum(((alpha + beta * s) / t - 1) ** 2 for s, t in points)


def _stretch(points: Sequence[tuple[int, float]]) -> Stretch:
    alpha, beta, error = _line(points)
    n = len(points)
    w = [1 / (t * t) for _, t in points]
    sw, sx = sum(w), sum(a * s for a, (s, _) in zip(w, points, strict=True))
    sxx = sum(a * s * s for a, (s, _) in zip(w, points, strict=True))
    det = sw * sxx - sx * sx
    alpha_error = beta_error = None
    if n > 2 and det > 0:
        scale = T_QUANTILES[min(n - 3, len(T_QUANTILES) - 1)] * math.sqrt(error / (n - 2))
        alpha_error, beta_error = scale * math.sqrt(sxx / det), scale * math.sqrt(sw / det)
    return Stretch(points[0][0], points[-1][0], alpha, beta, alpha_error, beta_error)
