# rejected at: right
# Adds up the means of the pieces: the gradient is too large by their number.
from torch import nn


def gradients(model, x, y, size):
    model.zero_grad()
    total = 0.0
    for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
        loss = nn.functional.cross_entropy(model(part_x), part_y)
        loss.backward()
        total += loss.item() * len(part_y) / len(y)
    return total
