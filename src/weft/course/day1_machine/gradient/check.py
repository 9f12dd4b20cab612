import torch


def check(learner, t):
    for b, k, n in ((3, 5, 7), *([t.integers(1, 20) for _ in range(3)] for _ in range(2))):
        x, w, dy = t.randn(b, k), t.randn(k, n), t.randn(b, n)
        x[t.integers(0, b)] = 0  # a row whose h is exactly 0
        shapes = f"x [{b}, {k}], w [{k}, {n}]"
        got = t.probe("passes", x, w, dy)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = torch.relu(leaves[0] @ leaves[1])
        y.backward(dy)
        t.close(got["y"], y.detach(), f"forward({shapes})[0]", atol=1e-5)
        t.close(got["dx"], leaves[0].grad, f"dx, gradients(…)[0] of {shapes}", atol=1e-5)
        t.close(got["dw"], leaves[1].grad, f"dw, gradients(…)[1] of {shapes}", atol=1e-5)
        row, column = t.integers(0, k), t.integers(0, n)
        w64 = w.double()
        slope, calls, after = t.probe("slope", w64, dy[0, 0].item(), row, column)
        t.close(
            slope,
            3 * dy[0, 0].item() * w64[row, column].item() ** 2 + 1,
            f"numeric(loss, w, {row}, {column})",
            rtol=1e-4,
            atol=1e-4,
        )
        t.equal(calls, 2, "the number of times that numeric calls loss")
        t.unchanged(after, w64, "w")
    b, k, n = 32, 16, 128
    x, w = t.randn(b, k), t.randn(k, n)
    got = t.probe("passes", x, w, t.randn(b, n))
    own = 4 * (b * k + k * n)
    t.at_most(
        got["saved_bytes"] - own,
        b * n,
        f"bytes saved beside x and w for {b * n:,} elements of y",
        f"除 x 和 w 外为 y 的 {b * n:,} 个元素保存的字节数",
    )
