"""Against PyTorch's convolution; the products are counted."""

from torch.nn import functional as F


def check(learner, t):
    for B, C, H, W, N, k in ((1, 1, 5, 5, 1, 3), (3, 2, 6, 4, 5, 3), (2, 3, 7, 9, 4, 5), (4, 5, 3, 6, 2, 1)):
        B += t.integers(0, 3) if B > 1 else 0
        x, weight, bias = t.randn(B, C, H, W), t.randn(N, C, k, k), t.randn(N)
        what = f"convolve(x [{B}, {C}, {H}, {W}], weight [{N}, {C}, {k}, {k}], bias [{N}])"
        t.close(learner.convolve(x, weight, bias), F.conv2d(x, weight, bias, padding=k // 2), what, 1e-4, 1e-4)
        what = f"flops(B={B}, C={C}, H={H}, W={W}, N={N}, k={k})"
        t.equal(learner.flops(B, C, H, W, N, k), 2 * B * H * W * N * C * k * k, what)
    ran = t.probe("products", t.randn(16, 3, 8, 8), t.randn(4, 3, 3, 3), t.randn(4))
    t.require(ran, "convolve ran no matrix product", "convolve 没有做任何矩阵乘")
    t.at_most(len(ran), 1, "matrix products for 16 images", "16 张图的矩阵乘次数")
