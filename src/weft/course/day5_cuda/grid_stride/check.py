"""Several launches; accesses and races from the interpreted PTX; sectors."""

import numpy as np

from weft.learn import cuda


def check(learner, t):
    kernel = cuda.kernel(t, "saxpy")
    for grid, block in ((3, 64), (1, 32), (40, 96), (2, 33)):
        n = t.integers(500, 1500)
        a = float(t.integers(2, 9))
        x, y = (t.rng.integers(-9, 9, n).astype(np.float32) for _ in range(2))
        expected = np.float32(a) * x + y
        counts = kernel.launch((grid,), (block,), n, a, x, y)
        kernel.right(t, y, expected, f"y after saxpy<<<{grid}, {block}>>>(n={n}, a={a:g}, x, y)")
    kernel.safe()
    n = 1024
    x, y = np.ones(n, np.float32), np.ones(n, np.float32)
    counts = kernel.launch((4,), (64,), n, 2.0, x, y)
    t.at_most(
        counts.sectors_read,
        2 * n // 8,
        "32-byte sectors read for 1,024 elements of x and y",
        "读取 x、y 各 1,024 个元素的 32 字节扇区数",
    )
    t.at_most(counts.sectors_written, n // 8, "32-byte sectors written", "写入的 32 字节扇区数")


def fast(learner, t):
    n = 1 << 25
    x, y = (t.rng.standard_normal(n, np.float32) for _ in range(2))
    expected = np.float32(2.0) * x + y
    cuda.kernel(t, "saxpy").timed(t, (2048,), (256,), [n, 2.0, x, y], {3: expected}, at_least=0.5, n=n)
