# rejected at: right
# alpha / beta: of one message, not of a ring that cuts it into n.
def fit(sizes, times):
    x = [1 / t for t in times]
    y = [s / t for s, t in zip(sizes, times, strict=True)]
    xx, xy, yy = (sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((x, x), (x, y), (y, y)))
    determinant = xx * yy - xy * xy
    return (sum(x) * yy - sum(y) * xy) / determinant, (sum(y) * xx - sum(x) * xy) / determinant


def ring_s(n, size, alpha, beta):
    return 2 * (n - 1) * (alpha + size / n * beta)


def crossover(n, alpha, beta):
    return alpha / beta


def bus_bandwidth(n, size, seconds):
    return 2 * (n - 1) / n * size / seconds
