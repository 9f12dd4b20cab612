"""Output, gradients and random numbers against the same blocks without checkpoints; then the bytes saved."""

import torch
from torch.nn import functional as F


def expected(weights, x, seed):
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    leaves = [w.clone().requires_grad_() for pair in weights for w in pair]
    y = x
    for a, b in zip(leaves[::2], leaves[1::2], strict=True):
        y = F.dropout(torch.tanh(y @ a), 0.5) @ b
    y.square().sum().backward()
    return y.detach(), x.grad, [w.grad for w in leaves], torch.rand(4)


def check(learner, t):
    B, D, H = t.integers(20, 30), t.integers(4, 8), 64
    weights = [[t.randn(D, H) / 3, t.randn(H, D) / 5] for _ in range(3)]
    x = t.randn(B, D)
    before = torch.get_rng_state()
    y, dx, grads, after = expected(weights, x, t.seed % 1000)
    torch.set_rng_state(before)
    got_y, got_dx, got_grads, got_after, saved, runs = t.probe("run", weights, x, t.seed % 1000)
    t.close(got_y, y, "three checkpointed blocks", 1e-4, 1e-5)
    t.close(got_dx, dx, "gradient of the input", 1e-4, 1e-4)
    for i, (g, e) in enumerate(zip(got_grads, grads, strict=True)):
        t.close(g, e, f"gradient of {'ab'[i % 2]} of block {i // 2}", 1e-4, 1e-4)
    t.close(got_after, after, "torch.rand(4) after the backward pass")
    t.at_most(
        saved,
        3 * 4 * B * D,
        "bytes saved by three blocks, whose inputs are that large",
        "三个块保存的字节数（上限是它们的输入）",
    )
    t.require(runs == 6, f"the blocks ran {runs} times; 6 are expected", f"块运行了 {runs} 次；应为 6 次", stage="fast")
