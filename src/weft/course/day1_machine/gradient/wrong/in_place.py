# rejected at: right
# Adding and subtracting leaves w changed.
import torch


def forward(x, w):
    y = (x @ w).clamp(min=0)
    return y, (x, w, y > 0)


def gradients(dy, saved):
    x, w, positive = saved
    dh = dy * positive
    return dh @ w.T, x.T @ dh


def numeric(loss, w, row, column, step=1e-3):
    w[row, column] += step
    up = loss(w)
    w[row, column] -= 2 * step
    return (up - loss(w)) / (2 * step)
