# rejected at: right
# Seconds, not microseconds.
import statistics


def median_us(call, clock, repeats):
    call()
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)
