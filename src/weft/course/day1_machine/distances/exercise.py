"""
[en
`x` has N points and `y` M points of D coordinates each. Wanted are the N × M squared distances, without a loop in Python: line up the
shapes so that broadcasting pairs every x with every y.

    x  [N, D]  →  [N, 1, D]
    y  [M, D]  →  [1, M, D]          a dimension of size 1 counts as if repeated

There is a famous shorter way, |x|² + |y|² − 2·x·y. Try it as well: the check has points that lie far from 0 and close to each other.
en]
[zh
`x` 有 N 个点，`y` 有 M 个点，每个点 D 个坐标。求 N × M 个平方距离，不用 Python 循环：对齐形状，让广播（broadcasting）把每个 x 与
每个 y 配对。

    x  [N, D]  →  [N, 1, D]
    y  [M, D]  →  [1, M, D]          大小为 1 的维度视为重复

有一个著名的更短写法，|x|² + |y|² − 2·x·y。也试试它：检查里有离 0 很远、彼此很近的点。
zh]
"""

import torch

# I AM NOT DONE


def squared_distances(x, y):
    # TODO(en): a float32 tensor of shape [N, M].
    # TODO(zh): 形状为 [N, M] 的 float32 张量。
    # [solution
    difference = x[:, None, :] - y[None, :, :]  # [N, M, D]
    return (difference * difference).sum(-1)
    # solution]
    # [skeleton
    #: return torch.zeros(len(x), len(y))
    # skeleton]


def nearest(x, y):
    # TODO(en): for each x the number of the nearest y: an int64 tensor of shape [N]. Of equals, the first.
    # TODO(zh): 对每个 x 返回最近的 y 的编号：形状为 [N] 的 int64 张量。距离相等时取第一个。
    # [solution
    return squared_distances(x, y).argmin(1)
    # solution]
    # [skeleton
    #: return torch.zeros(len(x), dtype=torch.int64)
    # skeleton]
