"""Paired times with a common drift and outliers, for which unpaired or mean-based answers are wrong."""

import statistics


def percentile(values, share):
    values = sorted(values)
    at = share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return values[below] + (at - below) * (values[above] - values[below])


def check(learner, t):
    for true in (1.3, 1.0, 0.8, 1.05, 1.015, 0.99):
        n = t.integers(11, 31)
        drift = [1 + 0.5 * i / n for i in range(n)]
        noise = t.rng.normal(1, 0.004, (2, n))
        after = [float(1e-3 * d * e) for d, e in zip(drift, noise[0], strict=True)]
        before = [float(1e-3 * true * d * e) for d, e in zip(drift, noise[1], strict=True)]
        for _ in range(2):  # an interruption
            after[t.integers(0, n)] *= 30
        ratios = [b / a for b, a in zip(before, after, strict=True)]
        low, middle, high = (percentile(ratios, s) for s in (0.2, 0.5, 0.8))
        verdict = "faster" if low > 1.02 else "slower" if high < 0.98 else "not shown"
        got = learner.claim(before, after)
        what = f"claim({n} pairs, about {true} times)"
        t.close(got[:3], (middle, low, high), what, rtol=1e-9)
        t.equal(got[3], verdict, f"{what}[3]")
    t.equal(learner.claim([2.0], [1.0])[3], "faster", "claim([2.0], [1.0])[3]")
    t.close(learner.percentile([3.0, 1.0, 2.0], 0.5), statistics.median([1, 2, 3]), "percentile([3, 1, 2], 0.5)")
