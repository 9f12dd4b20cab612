# rejected at: right
# The upper of the two in the middle.
def median_us(call, clock, repeats):
    call()
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append((clock() - start) * 1e6)
    return sorted(times)[repeats // 2]
