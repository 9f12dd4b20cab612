import torch


def check(learner, t):
    m, n = t.integers(3, 9), t.integers(70, 120)
    for scale, shift in ((1.0, 0.0), (30.0, 0.0), (1.0, 500.0), (1.0, -500.0)):
        x = scale * t.randn(m, n) + shift
        expected = torch.softmax(x.double(), 1).float()
        t.close(learner.softmax(x), expected, f"softmax(x), x = {scale:g} · randn + {shift:g}, [{m}, {n}]", 1e-4)
        t.require(
            t.count("bytes_written") >= x.nbytes, "no kernel of yours wrote the result", "结果不是由你的核函数写出的"
        )
    x = t.randn(2, 64)
    t.close(learner.softmax(x), torch.softmax(x.double(), 1).float(), "softmax(x), x = randn, [2, 64]", 1e-4)
    for size in (4, 2):
        m, n = t.integers(10, 2000), t.integers(10, 2000)
        matrix, column = m * n * size, m * size
        t.predict(
            f"bytes_fused({m}, {n}, {size})", learner.bytes_fused(m, n, size), 2 * matrix,
            "Each element of x once in, each of out once out.", "x 的每个元素读一次，out 的每个元素写一次。",
        )  # fmt: skip
        t.predict(
            f"bytes_unfused({m}, {n}, {size})", learner.bytes_unfused(m, n, size), 8 * matrix + 4 * column,
            "Add up what each of the five kernels reads and writes; a column has m elements.",
            "把五个核函数各自读写的量加起来；一列有 m 个元素。",
        )  # fmt: skip
    learner.softmax(x)
    t.at_most(t.count("bytes_read") + t.count("bytes_written"), 8 * x.numel(), "bytes moved", "搬运的字节数")


def fast(learner, t):
    m, n = 8192, 4096
    t.timed(
        learner.softmax,
        [t.randn(m, n)],
        lambda x: torch.softmax(x, 1),
        f"softmax(x) of {m} x {n}",
        at_least=0.55,
        m=m,
        n=n,
    )
