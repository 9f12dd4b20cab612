"""
[en
A claim is a measurement: is the new kernel faster, and by how much?

before[i] and after[i] are times that were taken one right after the other, so that both saw the same clocks.
en]
[zh
结论就是一次测量：新核函数更快吗？快多少？

before[i] 和 after[i] 是紧接着先后测得的时间，因此两者面对的是相同的频率。
zh]
"""


# TODO(en): Return (ratio, low, high, verdict). The ratio is the median of before[i] / after[i]; low and high are its 20th and
#   80th percentiles (use ``percentile``). The verdict is "faster" if low is above 1.02, "slower" if high is below 0.98, and
#   otherwise "not shown".
# TODO(zh): 返回 (ratio, low, high, verdict)。ratio 是 before[i] / after[i] 的中位数；low 和 high 是第 20 和第 80 百分位
#   （用 ``percentile``）。low 大于 1.02 时 verdict 为 "faster"，high 小于 0.98 时为 "slower"，否则为 "not shown"。
def claim(before: list[float], after: list[float]) -> tuple[float, float, float, str]:
    # [skeleton
    #: ratio = sum(before) / sum(after)
    #: return ratio, ratio, ratio, "faster" if ratio > 1 else "slower"
    # skeleton]
    # [solution
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    low, ratio, high = (percentile(ratios, share) for share in (0.2, 0.5, 0.8))
    verdict = "faster" if low > 1.02 else "slower" if high < 0.98 else "not shown"
    return ratio, low, high, verdict
    # solution]


def percentile(values: list[float], share: float) -> float:
    """Linear between the sorted values; share 0 is the least, 1 the largest."""
    values = sorted(values)
    at = share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return values[below] + (at - below) * (values[above] - values[below])


# I AM NOT DONE
