# rejected at: right
# Chunks of length // ranks: what is left over is lost.
import numpy as np


def all_reduce(rank, ranks, data):
    chunks = [
        chunk.copy()
        for chunk in (data[i * (len(data) // ranks) : (i + 1) * (len(data) // ranks)] for i in range(ranks))
    ]
    for step in range(ranks - 1):
        received = yield chunks[(rank - step) % ranks]
        chunks[(rank - step - 1) % ranks] += received
    for step in range(ranks - 1):
        received = yield chunks[(rank + 1 - step) % ranks]
        chunks[(rank - step) % ranks] = received
    return np.concatenate(chunks)
