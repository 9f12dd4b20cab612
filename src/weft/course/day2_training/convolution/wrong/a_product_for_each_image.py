# rejected at: fast
# A product for each image: B launches, none of which fills a GPU.
import torch
from torch.nn import functional as F


def flops(B, C, H, W, N, k):
    return 2 * B * H * W * N * C * k * k


def convolve(x, weight, bias):
    (B, _, H, W), k = x.shape, weight.shape[-1]
    columns = F.unfold(x, k, padding=k // 2)
    out = torch.stack([weight.flatten(1) @ columns[b] for b in range(B)])
    return out.unflatten(2, (H, W)) + bias[:, None, None]
