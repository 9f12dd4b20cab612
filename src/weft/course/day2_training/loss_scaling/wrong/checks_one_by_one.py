# rejected at: right
# Checks each gradient when its turn comes: weights before the bad one have moved.
import torch


def smallest_scale(gradient):
    scale = 1
    while gradient * scale < 2**-14:
        scale *= 2
    return scale


def update(weights, gradients, scale, good, interval, lr):
    for w, g in zip(weights, gradients, strict=True):
        if not torch.isfinite(g).all():
            return scale / 2, 0
        w -= lr * (g.float() / scale)
    if good + 1 == interval:
        return 2 * scale, 0
    return scale, good + 1
