# rejected at: right
# Mirrors the filter, as the convolution of mathematics does.
import torch
from torch.nn import functional as F


def flops(B, C, H, W, N, k):
    return 2 * B * H * W * N * C * k * k


def convolve(x, weight, bias):
    (B, _, H, W), k = x.shape, weight.shape[-1]
    columns = F.unfold(x, k, padding=k // 2).transpose(0, 1).flatten(1)
    out = (weight.flip(2, 3).flatten(1) @ columns).unflatten(1, (B, H * W)).transpose(0, 1)
    return out.unflatten(2, (H, W)) + bias[:, None, None]
