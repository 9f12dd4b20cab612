# rejected at: right
# From the first and the last point: their noise is the answer's.
def fit(sizes, times):
    beta = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    return times[0] - beta * sizes[0], beta


def ring_s(n, size, alpha, beta):
    return 2 * (n - 1) * (alpha + size / n * beta)


def crossover(n, alpha, beta):
    return n * alpha / beta


def bus_bandwidth(n, size, seconds):
    return 2 * (n - 1) / n * size / seconds
