# rejected at: right
# The distance, not its square.
import torch


def squared_distances(x, y):
    difference = x[:, None, :] - y[None, :, :]
    return (difference * difference).sum(-1).sqrt()


def nearest(x, y):
    return squared_distances(x, y).argmin(1)
