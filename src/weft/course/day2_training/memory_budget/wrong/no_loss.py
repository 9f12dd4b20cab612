# rejected at: right
# Forgets what the loss saves.
MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}


def state_bytes(sizes, optimizer):
    parameters = sum(i * o + o for i, o in zip(sizes[:-1], sizes[1:], strict=True))
    return 4 * parameters * (2 + MOMENTS[optimizer])


def activation_bytes(sizes, batch):
    return batch * (4 * sum(sizes[:-1]))


def largest_batch(sizes, optimizer, limit):
    return max(0, limit - state_bytes(sizes, optimizer)) // activation_bytes(sizes, 1)
