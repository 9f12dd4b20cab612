# rejected at: right
# The sign of dy is not that of h.
import torch


def forward(x, w):
    y = (x @ w).clamp(min=0)
    return y, (x, w, y > 0)


def gradients(dy, saved):
    x, w, positive = saved
    dh = dy.clamp(min=0)
    return dh @ w.T, x.T @ dh


def numeric(loss, w, row, column, step=1e-3):
    up, down = w.clone(), w.clone()
    up[row, column] += step
    down[row, column] -= step
    return (loss(up) - loss(down)) / (2 * step)
