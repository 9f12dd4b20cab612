# rejected at: right
# The minimum.
def median_us(call, clock, repeats):
    call()
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append((clock() - start) * 1e6)
    return min(times)
