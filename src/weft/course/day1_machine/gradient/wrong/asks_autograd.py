# rejected at: parse
# The library's own.
import torch


def forward(x, w):
    y = (x @ w).clamp(min=0)
    return y, (x, w, y > 0)


def gradients(dy, saved):
    x, w, _ = saved
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    torch.relu(x @ w).backward(dy)
    return x.grad, w.grad


def numeric(loss, w, row, column, step=1e-3):
    up, down = w.clone(), w.clone()
    up[row, column] += step
    down[row, column] -= step
    return (loss(up) - loss(down)) / (2 * step)
