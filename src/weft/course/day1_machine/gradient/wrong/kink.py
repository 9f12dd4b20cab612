# rejected at: right
# At exactly 0 the derivative is 0, not 1.
import torch


def forward(x, w):
    h = x @ w
    return h.clamp(min=0), (x, w, h >= 0)


def gradients(dy, saved):
    x, w, positive = saved
    dh = dy * positive
    return dh @ w.T, x.T @ dh


def numeric(loss, w, row, column, step=1e-3):
    up, down = w.clone(), w.clone()
    up[row, column] += step
    down[row, column] -= step
    return (loss(up) - loss(down)) / (2 * step)
