# rejected at: right
# The verdict looks at the median alone.
def claim(before, after):
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    low, ratio, high = (percentile(ratios, share) for share in (0.2, 0.5, 0.8))
    verdict = "faster" if ratio > 1 else "slower" if ratio < 1 else "not shown"
    return ratio, low, high, verdict


def percentile(values, share):
    values = sorted(values)
    at = share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return values[below] + (at - below) * (values[above] - values[below])
