# rejected at: run
# The orders are swapped: shapes do not fit.
import torch


def forward(x, w):
    y = (x @ w).clamp(min=0)
    return y, (x, w, y > 0)


def gradients(dy, saved):
    x, w, positive = saved
    dh = dy * positive
    return w @ dh.T, dh.T @ x.T


def numeric(loss, w, row, column, step=1e-3):
    up, down = w.clone(), w.clone()
    up[row, column] += step
    down[row, column] -= step
    return (loss(up) - loss(down)) / (2 * step)
