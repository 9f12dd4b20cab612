# rejected at: right
# One reading around all calls is a mean.
def median_us(call, clock, repeats):
    call()
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats * 1e6
