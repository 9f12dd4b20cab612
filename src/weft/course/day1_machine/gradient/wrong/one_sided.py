# rejected at: right
# A one-sided difference errs in proportion to the step.
import torch


def forward(x, w):
    y = (x @ w).clamp(min=0)
    return y, (x, w, y > 0)


def gradients(dy, saved):
    x, w, positive = saved
    dh = dy * positive
    return dh @ w.T, x.T @ dh


def numeric(loss, w, row, column, step=1e-3):
    up = w.clone()
    up[row, column] += step
    return (loss(up) - loss(w)) / step
