def check(learner, t):
    for programs, block in ((1, 64), (t.integers(3, 9), 64), (t.integers(3, 9), 16)):
        n = programs * block
        x, y = t.randn(n), t.randn(n)
        t.equal(learner.add(x, y, block), x + y, f"add(x, y, block={block}), x [{n}]")
        t.require(
            t.count("bytes_written") >= x.nbytes, "no kernel of yours wrote the result", "结果不是由你的核函数写出的"
        )
    t.at_most(t.count("bytes_read"), 8 * n, "bytes read", "读取的字节数")


def fast(learner, t):
    n = 1 << 24
    t.timed(
        learner.add,
        [t.randn(n), t.randn(n), 1024],
        lambda x, y, _: x + y,
        f"add(x, y, block=1024) of {n:,} elements",
        at_least=0.6,
        n=n,
    )
