# rejected at: right
# The mean: one interrupted measurement moves it.
def claim(before, after):
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    low, ratio, high = (percentile(ratios, share) for share in (0.2, 0.5, 0.8))
    ratio = sum(ratios) / len(ratios)
    verdict = "faster" if low > 1.02 else "slower" if high < 0.98 else "not shown"
    return ratio, low, high, verdict


def percentile(values, share):
    values = sorted(values)
    at = share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return values[below] + (at - below) * (values[above] - values[below])
