def check(learner, t):
    for m, n in ((16, 32), (t.integers(17, 31), t.integers(33, 63)), (t.integers(1, 16), t.integers(65, 95))):
        x, y = t.randn(m), t.randn(n)
        t.equal(learner.outer(x, y), x[:, None] * y[None, :], f"outer(x, y), x [{m}], y [{n}]")
        t.require(
            t.count("bytes_written") >= 4 * m * n, "no kernel of yours wrote the result", "结果不是由你的核函数写出的"
        )
    t.equal(learner.outer(x, y, 8, 16), x[:, None] * y[None, :], f"outer(x, y, rows=8, cols=16), x [{m}], y [{n}]")
    t.at_most(t.count("bytes_written"), 4 * m * n, "bytes written", "写入的字节数")
