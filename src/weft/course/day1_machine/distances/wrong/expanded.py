# rejected at: right
# Cancels: digits are lost far from 0.
import torch


def squared_distances(x, y):
    return (x * x).sum(1)[:, None] + (y * y).sum(1)[None, :] - 2 * x @ y.T


def nearest(x, y):
    return squared_distances(x, y).argmin(1)
