# rejected at: right
# Divides in fp16: gradients below 6e-8 become 0.
import torch


def smallest_scale(gradient):
    scale = 1
    while gradient * scale < 2**-14:
        scale *= 2
    return scale


def update(weights, gradients, scale, good, interval, lr):
    if not all(torch.isfinite(g).all() for g in gradients):
        return scale / 2, 0
    for w, g in zip(weights, gradients, strict=True):
        w -= lr * (g / scale).float()
    if good + 1 == interval:
        return 2 * scale, 0
    return scale, good + 1
