# rejected at: right
# Gradients from before the call still count.
from torch import nn


def gradients(model, x, y, size):
    total = 0.0
    for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
        loss = nn.functional.cross_entropy(model(part_x), part_y, reduction="sum") / len(y)
        loss.backward()
        total += loss.item()
    return total
