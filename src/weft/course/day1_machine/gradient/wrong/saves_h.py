# rejected at: fast
# Saves four bytes where one is enough.
import torch


def forward(x, w):
    h = x @ w
    return h.clamp(min=0), (x, w, h)


def gradients(dy, saved):
    x, w, h = saved
    dh = dy * (h > 0)
    return dh @ w.T, x.T @ dh


def numeric(loss, w, row, column, step=1e-3):
    up, down = w.clone(), w.clone()
    up[row, column] += step
    down[row, column] -= step
    return (loss(up) - loss(down)) / (2 * step)
