"""
[en
Gradient accumulation: the gradient of a large batch with the memory of a small one.
en]
[zh
梯度累积（gradient accumulation）：用小批次的内存，得到大批次的梯度。
zh]
"""

import torch
from torch import Tensor, nn


# TODO(en): Leave in parameter.grad the gradient of the *mean* cross entropy over the whole batch, computed in pieces of at
#   most ``size`` examples, each with its own forward and backward. The last piece may be smaller. Gradients of before must not
#   count. Return the mean loss as a float.
# TODO(zh): 在 parameter.grad 中留下整个批次*平均*交叉熵的梯度，分块计算：每块最多 ``size`` 个样本，各自做一次前向和反向。
#   最后一块可能更小。之前的梯度不得计入。返回平均损失，类型为 float。
def gradients(model: nn.Module, x: Tensor, y: Tensor, size: int) -> float:
    """x [B, F], y [B]."""
    # [skeleton
    #: model.zero_grad()
    #: loss = nn.functional.cross_entropy(model(x), y)
    #: loss.backward()
    #: return loss.item()
    # skeleton]
    # [solution
    model.zero_grad()
    total = 0.0
    for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
        loss = nn.functional.cross_entropy(model(part_x), part_y, reduction="sum") / len(y)
        loss.backward()
        total += loss.item()
    return total
    # solution]


# I AM NOT DONE
