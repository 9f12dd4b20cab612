# rejected at: right
# Padding of one pixel, whatever the filter's size.
import torch
from torch.nn import functional as F


def flops(B, C, H, W, N, k):
    return 2 * B * H * W * N * C * k * k


def convolve(x, weight, bias):
    (B, _, H, W), k = x.shape, weight.shape[-1]
    x = F.pad(x, (1, k - 2, 1, k - 2))
    columns = F.unfold(x, k).transpose(0, 1).flatten(1)
    out = (weight.flatten(1) @ columns).unflatten(1, (B, H * W)).transpose(0, 1)
    return out.unflatten(2, (H, W)) + bias[:, None, None]
