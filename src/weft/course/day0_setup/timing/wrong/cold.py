# rejected at: right
# The first call is timed.
def median_us(call, clock, repeats):
    times = []
    for _ in range(repeats + 1):
        start = clock()
        call()
        times.append((clock() - start) * 1e6)
    times.sort()
    return times[len(times) // 2]
