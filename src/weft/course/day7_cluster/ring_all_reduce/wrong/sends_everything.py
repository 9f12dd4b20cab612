# rejected at: fast
# Passes the whole data round: n / 2 times the bytes.
def all_reduce(rank, ranks, data):
    total = data.copy()
    for _ in range(ranks - 1):
        data = yield data
        total += data
    return total
