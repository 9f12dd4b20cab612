"""Parameters, gradients and pairs of optimizers for the tests of ``weft.optim``."""

import torch
from where import DEVICE

from weft import optim

SHAPES = ((3, 5), (1,), (), (0,), (2100,), (17, 9))
PAIRS = {"Adam": {"lr": 1e-2}, "AdamW": {"lr": 1e-2}, "SGD": {"lr": 1e-2, "momentum": 0.9}}
MATRIX = [
    ("Adam", {"amsgrad": True}), ("Adam", {"maximize": True, "weight_decay": 0.1}),
    ("Adam", {"betas": (0.0, 0.5), "eps": 1e-3}), ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"amsgrad": True, "maximize": True, "weight_decay": 0.3}), ("AdamW", {"betas": (0.5, 0.0)}),
    ("SGD", {"momentum": 0.0}), ("SGD", {"momentum": 0.0, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"dampening": 0.3}), ("SGD", {"nesterov": True, "weight_decay": 0.1}),
]  # fmt: skip

IN_8_BITS = [{}, {"state_format": "fp8"}, {"code_rounding": "stochastic", "seed": 3}]
IN_8_BITS += [{"amsgrad": True, "block_size": 128}, {"block_size": 2048, "maximize": True}]


def weights(shapes=SHAPES, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(DEVICE, dtype)) for s in shapes]


def set_gradients(*lists, seed=0, scale=1.0):
    """The same random gradients for the parameters of each list."""
    g = torch.Generator().manual_seed(1000 + seed)
    for same in zip(*lists, strict=True):
        drawn = torch.randn(same[0].shape, generator=g) * scale
        for p in same:
            p.grad = drawn.to(p.device, p.dtype, copy=True)


def random_step(*optimizers, seed=0, scale=1.0):
    """A step of each with the same random gradients."""
    every = ([p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers)
    set_gradients(*every, seed=seed, scale=scale)
    for optimizer in optimizers:
        optimizer.step()


def assert_close(ours, theirs, steps=1, dtype=torch.float32):
    """To rounding: each step rounds a weight of a few units once, and its update, relatively, a few times."""
    for a, b in zip(ours, theirs, strict=True):
        bound = steps * torch.finfo(dtype).eps * max(float(b.detach().abs().max()) if b.numel() else 0.0, 1.0)
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=bound)


def assert_same_steps(mine, theirs, a, b, steps=3, change=lambda step: None, dtype=torch.float32):
    """Both optimizers make the same steps; ``change`` is called when the gradients of a step are there."""
    for step in range(steps):
        set_gradients(mine, theirs, seed=step)
        change(step)
        a.step()
        b.step()
    assert_close(mine, theirs, steps, dtype)


def both(name, shapes=SHAPES, dtype=torch.float32, **options):
    mine, theirs = weights(shapes, dtype), weights(shapes, dtype)
    options = {**PAIRS[name], **options}
    return mine, theirs, getattr(optim, name)(mine, **options), getattr(torch.optim, name)(theirs, **options)
