def check(learner, t):
    m, n = t.integers(18, 30), t.integers(34, 60)
    bias = t.randn(n)
    views = {
        "x": t.randn(m, n),
        "x.T": t.randn(n, m).T,
        "x[:, ::2]": t.randn(m, 2 * n)[:, ::2],
        "x[1:, 3:]": t.randn(m + 1, n + 3)[1:, 3:],
        "x[0].expand(m, n)": t.randn(1, n)[0].expand(m, n),
    }
    sectors = {}
    for name, x in views.items():
        what = f"add_bias({name}, bias), [{m}, {n}], stride() == {x.stride()}"
        t.equal(learner.add_bias(x, bias), x + bias, what)
        t.require(
            t.count("bytes_written") >= 4 * m * n, "no kernel of yours wrote the result", "结果不是由你的核函数写出的"
        )
        sectors[name] = t.count("sectors_read")
    said = ", ".join(f"{name}: {count}" for name, count in sectors.items())
    t.at_most(t.count("bytes_written"), 4 * m * n, "bytes written", "写入的字节数")
    t.note(f"sectors of 32 bytes read: {said}", f"读取的 32 字节扇区数：{said}")
