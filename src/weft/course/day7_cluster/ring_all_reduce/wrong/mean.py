# rejected at: right
# The mean instead of the sum.
import numpy as np


def all_reduce(rank, ranks, data):
    chunks = [chunk.copy() for chunk in np.array_split(data, ranks)]
    for step in range(ranks - 1):
        received = yield chunks[(rank - step) % ranks]
        chunks[(rank - step - 1) % ranks] += received
    for step in range(ranks - 1):
        received = yield chunks[(rank + 1 - step) % ranks]
        chunks[(rank - step) % ranks] = received
    return np.concatenate(chunks) / ranks
