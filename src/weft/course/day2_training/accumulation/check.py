"""The gradients of the whole batch, with pieces of unequal size; then the activations that are saved at once."""

import torch
from torch.nn import functional as F


def check(learner, t):
    for pieces, rest in ((3, 0), (4, 1), (2, 3)):
        size, features, hidden, classes = t.integers(4, 8), t.integers(3, 7), t.integers(5, 9), t.integers(3, 6)
        B = pieces * size + rest
        x, y = t.randn(B, features), t.integers(0, classes, B)
        w1, w2 = t.randn(hidden, features), t.randn(classes, hidden)
        a, b = w1.clone().requires_grad_(), w2.clone().requires_grad_()
        loss = F.cross_entropy(torch.tanh(x @ a.T) @ b.T, y)
        loss.backward()
        got, g1, g2, peak = t.probe("run", w1, w2, x, y, size)
        what = f"gradients(model, x [{B}, {features}], y, size={size})"
        t.close(g1, a.grad, f"{what}: model[0].weight.grad", 1e-4, 1e-5)
        t.close(g2, b.grad, f"{what}: model[2].weight.grad", 1e-4, 1e-5)
        t.close(got, loss.item(), what, 1e-4)
    size, B = 16, 256
    x, y = t.randn(B, 32), t.integers(0, 8, B)
    peak = t.probe("run", t.randn(64, 32), t.randn(8, 64), x, y, size)[3]
    # of an example: its input, the hidden layer (in and out of tanh may both be saved), log-probabilities twice, its label
    limit = size * (4 * (32 + 2 * 64 + 2 * 8) + 8) + 64
    t.at_most(
        peak,
        limit,
        "bytes of activations saved at once for 256 examples in pieces of 16",
        "256 个样本按 16 个一块处理，同时保存的激活值（字节）",
    )
