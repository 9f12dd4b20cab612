# rejected at: right
# [M, N].
import torch


def squared_distances(x, y):
    difference = y[:, None, :] - x[None, :, :]
    return (difference * difference).sum(-1)


def nearest(x, y):
    return squared_distances(x, y).argmin(1)
