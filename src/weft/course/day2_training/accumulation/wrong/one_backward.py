# rejected at: fast
# One backward pass at the end: the activations of all pieces are in memory at once.
from torch import nn


def gradients(model, x, y, size):
    model.zero_grad()
    loss = 0.0
    for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
        loss = loss + nn.functional.cross_entropy(model(part_x), part_y, reduction="sum") / len(y)
    loss.backward()
    return loss.item()
