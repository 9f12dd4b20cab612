# rejected at: right
# Moves the points to their mean inside the arguments.
import torch


def squared_distances(x, y):
    mean = y.mean(0)
    x -= mean
    y -= mean
    difference = x[:, None, :] - y[None, :, :]
    return (difference * difference).sum(-1)


def nearest(x, y):
    return squared_distances(x, y).argmin(1)
