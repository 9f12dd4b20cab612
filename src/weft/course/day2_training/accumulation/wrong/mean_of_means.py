# rejected at: right
# Divides by the number of pieces: wrong when the last piece is smaller.
from torch import nn


def gradients(model, x, y, size):
    model.zero_grad()
    pieces = list(zip(x.split(size), y.split(size), strict=True))
    total = 0.0
    for part_x, part_y in pieces:
        loss = nn.functional.cross_entropy(model(part_x), part_y) / len(pieces)
        loss.backward()
        total += loss.item()
    return total
