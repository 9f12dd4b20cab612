# rejected at: right
# A mean carries the disturbed call.
def median_us(call, clock, repeats):
    call()
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append((clock() - start) * 1e6)
    return sum(times) / len(times)
