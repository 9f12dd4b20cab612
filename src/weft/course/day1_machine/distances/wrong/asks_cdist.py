# rejected at: parse
# The library's own.
import torch


def squared_distances(x, y):
    return torch.cdist(x, y) ** 2


def nearest(x, y):
    return squared_distances(x, y).argmin(1)
