"""The same history and weights as the slow loop, and three counts."""

import numpy as np
import torch
from torch.nn import functional as F


def expected(w1, w2, images, labels, batches):
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    history = []
    for epoch in batches:
        loss_sum, right, seen = 0.0, 0, 0
        for batch in epoch:
            x, y = torch.tensor(images[batch], dtype=torch.float32) / 16, torch.tensor(labels[batch])
            logits = torch.relu(x @ w1) @ w2
            loss = F.cross_entropy(logits, y)
            for w, g in zip((w1, w2), torch.autograd.grad(loss, (w1, w2)), strict=True):
                w.data -= 0.1 * g
            loss_sum, seen = loss_sum + loss.item() * len(batch), seen + len(batch)
            right += (logits.argmax(1) == y).sum().item()
        history.append((loss_sum / seen, right / seen))
    return history, w1.detach(), w2.detach()


def check(learner, t):
    for n, epochs, size in ((50, 2, 16), (250, 2, 64)):
        n += t.integers(1, 15)
        images = t.rng.integers(0, 17, (n, 20), dtype=np.uint8)
        labels = t.rng.integers(0, 5, n)
        batches = [np.array_split(t.rng.permutation(n), -(-n // size)) for _ in range(epochs)]
        w1, w2 = t.randn(20, 32) / 4, t.randn(32, 5) / 5
        history, a, b = expected(w1, w2, images, labels, batches)
        got, got_a, got_b, counts = t.probe("run", w1, w2, images, labels, batches)
        what = f"train(…, {n} images, {epochs} epochs)"
        t.close(got, history, what, 1e-3, 1e-4)
        t.close(got_a, a, f"{what}: the first weight", 1e-3, 1e-4)
        t.close(got_b, b, f"{what}: the second weight", 1e-3, 1e-4)
    steps = sum(map(len, batches))
    operators, waits, runs = counts
    t.at_most(
        waits,
        2 * epochs,
        f"reads of a number from a tensor in {epochs} epochs",
        f"{epochs} 个 epoch 里从张量读数字的次数",
    )
    t.at_most(runs, steps, f"forward passes for {steps} batches", f"{steps} 个批次的前向次数")
    t.at_most(operators, 60 * steps, f"operators for {steps} batches", f"{steps} 个批次的算子数")
