# rejected at: right
# Counts a multiplication and an addition as one.
from torch.nn import functional as F


def flops(B, C, H, W, N, k):
    return B * H * W * N * C * k * k


def convolve(x, weight, bias):
    (B, _, H, W), k = x.shape, weight.shape[-1]
    columns = F.unfold(x, k, padding=k // 2).transpose(0, 1).flatten(1)
    out = (weight.flatten(1) @ columns).unflatten(1, (B, H * W)).transpose(0, 1)
    return out.unflatten(2, (H, W)) + bias[:, None, None]
