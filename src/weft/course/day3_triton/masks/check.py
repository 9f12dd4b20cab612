def check(learner, t):
    block = 32
    for n in (1, block - 1, block, 32 * block + t.integers(1, block), 5 * block + t.integers(1, block)):
        a, x, y = float(t.rng.standard_normal()), t.randn(n), t.randn(n)
        t.close(learner.axpy(a, x, y, block), a * x + y, f"axpy({a:.3f}, x, y, block={block}), x [{n}]")
        t.require(
            t.count("bytes_written") >= x.nbytes, "no kernel of yours wrote the result", "结果不是由你的核函数写出的"
        )
    t.at_most(t.count("bytes_read"), 8 * n, "bytes read", "读取的字节数")


def fast(learner, t):
    n = (1 << 24) + 5
    args = [0.5, t.randn(n), t.randn(n), 1024]
    t.timed(
        learner.axpy, args, lambda a, x, y, _: a * x + y, f"axpy(0.5, x, y, block=1024), x [{n:,}]", at_least=0.5, n=n
    )
