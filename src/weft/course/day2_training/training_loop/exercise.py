"""
[en
One epoch of training: the five lines that every training program in PyTorch is built around.
en]
[zh
训练一个 epoch：每个 PyTorch 训练程序的核心都是这五行。
zh]
"""

import torch
from torch import nn


# TODO(en): Go through the batches once. For each batch: delete the old gradients, compute the logits and the mean cross
#   entropy of the batch (nn.functional.cross_entropy), compute the gradients, and let the optimizer update the weights.
#   Return the mean loss of one *example* over the epoch, as a Python float: batches may have different sizes.
# TODO(zh): 把所有批次走一遍。对每个批次：清除旧梯度，计算 logits 和该批次的平均交叉熵
#   （nn.functional.cross_entropy），求梯度，再让优化器更新权重。
#   返回整个 epoch 里每个*样本*的平均损失，类型为 Python float：各批次的大小可能不同。
def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> float:
    """batches: [(x [B, F], y [B], integer classes), …]."""
    # [skeleton
    #: return 0.0
    # skeleton]
    # [solution
    total, examples = 0.0, 0
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
        examples += len(y)
    return total / examples
    # solution]


# I AM NOT DONE
