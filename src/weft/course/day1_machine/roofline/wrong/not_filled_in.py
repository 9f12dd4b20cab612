# rejected at: predict
# No prediction.
def attainable(flops, bytes_moved, bandwidth, peak):
    return min(peak, bandwidth * flops / bytes_moved)


def seconds(flops, bytes_moved, bandwidth, peak):
    return max(flops / peak, bytes_moved / bandwidth)


def matmul_cost(m, n, k, size=2):
    return 2 * m * n * k, size * (m * k + k * n + m * n)


LARGE = "compute"


ONE_TOKEN = "memory"


RIDGE_N = 3 * 989e12 / 4.8e12


TOKENS = None
