import torch


def check(learner, t):
    for Z, S, D, m, n in (
        (2, t.integers(33, 48), 16, 32, 32),
        (1, t.integers(17, 31), 32, 16, 32),
    ):
        scale = 2 * D**-0.5
        q, k, v, do = (t.randn(Z, S, D) for _ in range(4))
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        seen = torch.ones(S, S, dtype=torch.bool).tril()
        scores = (scale * exact[0] @ exact[1].mT).masked_fill(~seen, float("-inf"))
        o = torch.softmax(scores, -1) @ exact[2]
        o.backward(do.double())
        got = t.probe("gradients", q, k, v, do, scale, m, n)
        what = f"attention(q, k, v, {scale:.2f}, m={m}, n={n}), [{Z}, {S}, {D}]"
        t.close(got[0], o.detach().float(), f"o, {what}", 1e-3, 1e-4)
        for name, mine, x in zip(("dv", "dk", "dq"), (got[3], got[2], got[1]), exact[::-1]):
            t.close(mine, x.grad.float(), f"{name}, {what}", 2e-3, 2e-3)
    t.at_most(got[4], 4 * Z * (4 * S * D + S), "bytes saved for backward", "为反向传播保存的字节数")
