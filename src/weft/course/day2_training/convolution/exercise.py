"""
[en
A convolution is a matrix product: this is why a GPU's tensor cores run CNNs.
en]
[zh
卷积就是矩阵乘：GPU 的张量核心（tensor core）因此能跑 CNN。
zh]
"""

import torch
from torch import Tensor
from torch.nn import functional as F


# TODO(en): Compute a convolution with stride 1 whose output is as high and wide as its input (zero padding of k // 2; k is
#   odd), with ONE matrix product for the whole batch. F.unfold(x, k, padding=k // 2) copies the k × k neighbourhood of each
#   pixel into a column: [B, C·k·k, H·W]. The weight, seen as a matrix, has the rows N and the columns C·k·k. Add the bias.
#   F.conv2d and nn.Conv2d do not count.
# TODO(zh): 计算步长为 1、输出与输入同高同宽的卷积（四周补零 k // 2；k 为奇数），整个批次只用*一次*矩阵乘。
#   F.unfold(x, k, padding=k // 2) 把每个像素的 k × k 邻域复制成一列：[B, C·k·k, H·W]。
#   把权重看成矩阵，它有 N 行、C·k·k 列。最后加上偏置。不许使用 F.conv2d 和 nn.Conv2d。
def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [B, C, H, W], weight [N, C, k, k], bias [N] -> [B, N, H, W]."""
    # [skeleton
    #: return torch.zeros(x.shape[0], weight.shape[0], *x.shape[2:])
    # skeleton]
    # [solution
    B, _, H, W = x.shape
    N, _, k, _ = weight.shape
    columns = F.unfold(x, k, padding=k // 2)  # [B, C·k·k, H·W]
    product = weight.flatten(1) @ columns.transpose(0, 1).flatten(1)  # [N, C·k·k] × [C·k·k, B·H·W]
    out = product.unflatten(1, (B, H * W)).transpose(0, 1)  # [B, N, H·W]
    return out.unflatten(2, (H, W)) + bias[:, None, None]
    # solution]


# TODO(en): How many floating-point operations does that product need (a multiplication and an addition are two)?
# TODO(zh): 这次矩阵乘需要多少次浮点运算（一次乘法加一次加法算两次）？
def flops(B: int, C: int, H: int, W: int, N: int, k: int) -> int:
    # [skeleton
    #: return 0
    # skeleton]
    # [solution
    return 2 * B * H * W * N * C * k * k
    # solution]


# I AM NOT DONE
