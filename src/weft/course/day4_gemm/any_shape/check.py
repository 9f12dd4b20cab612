def check(learner, t):
    shapes = [
        (32, 32, 16),
        (t.integers(33, 60), t.integers(3, 30), t.integers(17, 31)),
        (1, t.integers(33, 60), t.integers(1, 15)),
        (t.integers(2, 30), t.integers(2, 30), t.integers(33, 47)),
    ]
    for m, n, k in shapes:
        a, b = t.randn(m, k), t.randn(n, k).T
        expected = (a.double() @ b.double()).float()
        for what, x, y in (("a, b", a, b.contiguous()), ("a, w.T", a, b), ("x.T, w.T", a.T.contiguous().T, b)):
            what = f"matmul({what}), [{m}, {k}] @ [{k}, {n}]"
            t.close(learner.matmul(x, y), expected, what, 1e-4, 1e-4)
            t.require(
                t.count("bytes_written") >= expected.nbytes,
                "no kernel of yours wrote the result",
                "结果不是由你的核函数写出的",
            )
    t.at_most(t.count("bytes_written"), 4 * m * n, "bytes written", "写入的字节数")
