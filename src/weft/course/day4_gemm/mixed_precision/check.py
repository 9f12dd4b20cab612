def check(learner, t):
    for name, k, scale, shift in (
        ("randn", 96, 1.0, 0.0),
        ("randn + 0.5", 1024, 1.0, 0.5),
        ("randn + 16", 256, 1.0, 16.0),
    ):
        m, n = 32 * t.integers(1, 3), 32 * t.integers(1, 3)
        a, b = scale * t.randn(m, k, dtype="float16") + shift, scale * t.randn(k, n, dtype="float16") + shift
        exact = a.double() @ b.double()
        bias = (-exact.mean(0)).clamp(-60000, 60000).half() if shift > 1 else t.randn(n, dtype="float16")
        expected = (exact + bias.double()).clamp(min=0).half()
        what = f"linear_relu(a, b, bias), a, b = {name}, [{m}, {k}] @ [{k}, {n}]"
        t.close(learner.linear_relu(a, b, bias), expected, what, 1e-3, 0.02 if shift > 1 else 2e-3)
        t.require(
            t.count("bytes_written") >= 2 * m * n, "no kernel of yours wrote the result", "结果不是由你的核函数写出的"
        )
    t.at_most(t.count("bytes_written"), 2 * m * n, "bytes written", "写入的字节数")


def fast(learner, t):
    m = n = k = 4096
    tile = 128, 128, 32
    a, b, bias = t.randn(m, k, dtype="float16"), t.randn(k, n, dtype="float16"), t.randn(n, dtype="float16")
    args = [0.1 * a, b, bias, *tile]
    what = f"linear_relu(a, b, bias, {', '.join(map(str, tile))}), [{m}, {k}] @ [{k}, {n}]"
    shape = {"m": m, "n": n, "k": k}
    t.timed(learner.linear_relu, args, expected, what, at_least=0.5, rtol=1e-2, atol=0.1, dtype="fp16", **shape)


def expected(a, b, bias, *tile):
    return (a.float() @ b.float() + bias.float()).clamp(min=0).half()
