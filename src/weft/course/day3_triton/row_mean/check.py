import torch


def check(learner, t):
    cases = (
        ("x = randn", t.randn(3, 150 + t.integers(0, 40), dtype="float16")),
        ("x = randn", t.randn(2, t.integers(2, 60), dtype="float16")),
        ("x = ones", torch.ones(2, 4097, dtype=torch.float16)),
        ("x = |randn| + 1000", t.randn(2, 300, dtype="float16").abs() + 1000),
        ("x = randn + 8", t.randn(2, 3000, dtype="float16") + 8),
    )
    for name, x in cases:
        expected = x.double().mean(1).float()
        t.close(learner.row_mean(x), expected, f"row_mean(x), {name}, {list(x.shape)}", 1e-5, 1e-5)
        t.require(
            t.count("bytes_written") >= expected.nbytes,
            "no kernel of yours wrote the result",
            "结果不是由你的核函数写出的",
        )
    t.close(learner.row_mean(x, 256), expected, "row_mean(x, block=256)", 1e-5, 1e-5)
    t.at_most(t.count("bytes_read"), 2 * x.numel(), "bytes read", "读取的字节数")


def fast(learner, t):
    m, n = 16384, 4096
    args = [t.randn(m, n, dtype="float16"), 1024]
    t.timed(learner.row_mean, args, lambda x, _: x.float().mean(1), f"row_mean(x) of {m} x {n}", at_least=0.5, m=m, n=n)
