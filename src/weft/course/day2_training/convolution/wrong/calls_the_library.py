# rejected at: parse
# Calls the library.
import torch
from torch.nn import functional as F


def flops(B, C, H, W, N, k):
    return 2 * B * H * W * N * C * k * k


def convolve(x, weight, bias):
    return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
