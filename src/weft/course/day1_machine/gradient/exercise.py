"""
[en
A small layer:   h = x @ w          [B, N]
                 y = relu(h)        relu(h) = h where h > 0, else 0; its derivative is 1 where h > 0, else 0

`dy` is the gradient of some loss with respect to y. Wanted are those with respect to x and w, without autograd.

Check the shapes: dx has x's shape [B, K], dw has w's [K, N]; only one order of each product fits.
en]
[zh
一个小层：  h = x @ w          [B, N]
            y = relu(h)        relu(h) 在 h > 0 时为 h，否则为 0；导数在 h > 0 时为 1，否则为 0

`dy` 是某个损失对 y 的梯度。求对 x 和 w 的梯度，不用 autograd。

核对形状：dx 的形状与 x 相同，为 [B, K]，dw 与 w 相同，为 [K, N]；每个乘积只有一种次序对得上。
zh]
"""

import torch

# I AM NOT DONE


def forward(x, w):
    # TODO(en): y, and whatever `gradients` needs of the forward pass, in a tuple `saved`: (y, saved). Save as little as you can: the
    #   check counts bytes.
    # TODO(zh): 返回 y 以及 `gradients` 需要的前向结果，放进元组 `saved`：(y, saved)。存得越少越好：检查会数字节。
    # [solution
    y = (x @ w).clamp(min=0)
    return y, (x, w, y > 0)
    # solution]
    # [skeleton
    #: h = x @ w
    #: return h, (x, w, h)
    # skeleton]


def gradients(dy, saved):
    # TODO(en): dx and dw: a pair.
    # TODO(zh): 返回 dx 和 dw：一对。
    # [solution
    x, w, positive = saved
    dh = dy * positive
    return dh @ w.T, x.T @ dh
    # solution]
    # [skeleton
    #: x, w, h = saved
    #: return torch.zeros_like(x), torch.zeros_like(w)
    # skeleton]


def numeric(loss, w, row, column, step=1e-3):
    # TODO(en): the derivative of loss(w) with respect to w[row, column] from two calls: (loss(w + step) − loss(w − step)) / (2·step), with
    #   the step at that one element. Leave w as it was. `loss` returns a Python float.
    # TODO(zh): 用两次调用求 loss(w) 对 w[row, column] 的导数：(loss(w + step) − loss(w − step)) / (2·step)，只在这个元素上加减。
    #   w 要保持原样。`loss` 返回 Python 浮点数。
    # [solution
    up, down = w.clone(), w.clone()
    up[row, column] += step
    down[row, column] -= step
    return (loss(up) - loss(down)) / (2 * step)
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]
