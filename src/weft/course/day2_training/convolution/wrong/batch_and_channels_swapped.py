# rejected at: right
# Takes batch and channels apart in the wrong order: right for a batch of one.
import torch
from torch.nn import functional as F


def flops(B, C, H, W, N, k):
    return 2 * B * H * W * N * C * k * k


def convolve(x, weight, bias):
    (B, _, H, W), k = x.shape, weight.shape[-1]
    columns = F.unfold(x, k, padding=k // 2).transpose(0, 1).flatten(1)
    return (weight.flatten(1) @ columns).view(B, -1, H, W) + bias[:, None, None]
