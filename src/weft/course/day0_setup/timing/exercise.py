"""
[en
`clock()` gives the time in seconds, as `time.perf_counter` does; `call()` is what is timed. Neither is real here: the check has a clock
of its own, a first call that takes long, and now and then a call that something else disturbs.
en]
[zh
`clock()` 给出以秒计的时间，与 `time.perf_counter` 一样；`call()` 是被计时的对象。这里两者都不是真的：检查用的是自己的时钟，
第一次调用很慢，偶尔还有一次调用会被别的事情打扰。
zh]
"""

# I AM NOT DONE


def median_us(call, clock, repeats):
    # TODO(en): call once to warm up. Then call `repeats` times, timing each call alone, and return the median in microseconds. The
    #   median of an even number of times is the mean of the two in the middle.
    # TODO(zh): 先调用一次预热。然后调用 `repeats` 次，每次单独计时，返回中位数，以微秒计。偶数个时间的中位数是中间两个的平均值。
    # [solution
    call()
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append((clock() - start) * 1e6)
    times.sort()
    middle = repeats // 2
    return times[middle] if repeats % 2 else (times[middle - 1] + times[middle]) / 2
    # solution]
    # [skeleton
    #: start = clock()
    #: for _ in range(repeats):
    #:     call()
    #: return (clock() - start) / repeats
    # skeleton]
