"""The weights and the loss after an epoch, against an epoch computed here."""

import torch
from torch.nn import functional as F


def expected(weight, bias, batches, kind):
    w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    if kind == "sgd":
        optimizer = torch.optim.SGD([w, b], lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW([w, b], lr=0.05)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(x @ w.T + b, y, reduction="none")
        w.grad, b.grad = torch.autograd.grad(loss.mean(), [w, b])
        optimizer.step()
        losses.append(loss.detach())
    return torch.cat(losses).mean().item(), w.detach(), b.detach()


def check(learner, t):
    for kind in ("sgd", "adamw"):
        features, classes = t.integers(3, 9), t.integers(3, 6)
        sizes = [8, 8, 8, t.integers(1, 5)]
        batches = [(t.randn(n, features), t.integers(0, classes, n)) for n in sizes]
        weight, bias = t.randn(classes, features), t.randn(classes)
        loss, w, b = expected(weight, bias, batches, kind)
        got, name, got_w, got_b = t.probe("run", weight, bias, batches, kind)
        what = f"train_epoch(model, {kind}, batches of {sizes})"
        t.require(
            name == "float",
            f"{what} returned a {name}; a Python float is expected: loss.item()",
            f"{what} 返回了 {name}；应返回 Python float：loss.item()",
        )
        t.close(got_w, w, f"{what}: model.weight", rtol=1e-4, atol=1e-5)
        t.close(got_b, b, f"{what}: model.bias", rtol=1e-4, atol=1e-5)
        t.close(got, loss, what, rtol=1e-4)
