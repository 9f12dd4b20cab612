def check(learner, t):
    for tm, tn, tk in ((32, 32, 16), (16, 64, 32)):
        m, n, k = tm * t.integers(1, 3), tn * t.integers(3, 5), tk * t.integers(2, 5)
        a, b = t.randn(m, k), t.randn(k, n)
        expected = (a.double() @ b.double()).float()
        what = f"matmul(a, b, {tm}, {tn}, {tk}), a [{m}, {k}], b [{k}, {n}]"
        t.close(learner.matmul(a, b, tm, tn, tk), expected, what, 1e-4, 1e-4)
        t.require(
            t.count("bytes_written") >= expected.nbytes,
            "no kernel of yours wrote the result",
            "结果不是由你的核函数写出的",
        )
        limit = 4 * (m // tm) * (n // tn) * (tm + tn) * k
        t.at_most(
            t.count("bytes_read"), limit, f"bytes read with tiles of {tm} x {tn}", f"块为 {tm} x {tn} 时读取的字节数"
        )
