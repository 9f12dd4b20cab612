def check(learner, t):
    for m, n, k in ((5, 7, 32), (t.integers(2, 9), t.integers(9, 12), t.integers(70, 90))):
        a, b = t.randn(m, k), t.randn(k, n)
        expected = (a.double() @ b.double()).float()
        t.close(learner.matmul(a, b), expected, f"matmul(a, b), a [{m}, {k}], b [{k}, {n}]", 1e-4, 1e-4)
        t.require(
            t.count("bytes_written") >= expected.nbytes,
            "no kernel of yours wrote the result",
            "结果不是由你的核函数写出的",
        )
    t.at_most(t.count("bytes_read"), 8 * m * n * k, "bytes read", "读取的字节数")
    least = 4 * (m * k + k * n)
    read = t.count("bytes_read")
    t.note(
        f"{read / least:.1f} times the bytes of A and B: each element is read anew for every result that it enters",
        f"是 A 与 B 字节数的 {read / least:.1f} 倍：每个元素每参与一个结果就重读一次",
    )
