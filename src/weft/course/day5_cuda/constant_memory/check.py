"""Results with other taps and curves each time; races; passes over constant memory."""

import numpy as np

from weft.learn import cuda


def check(learner, t):
    kernel = cuda.kernel(t, "filter")
    for n in (t.integers(300, 500), t.integers(100, 250)):
        taps, curve = (t.rng.integers(-9, 9, size).astype(np.float32) for size in (9, 256))
        data = t.rng.integers(0, 256, n + 8).astype(np.uint8)
        kernel.set_constant("taps", taps)
        kernel.set_constant("curve", curve)
        y = np.zeros(n, np.float32)
        blocks = -(-n // 256)
        counts = kernel.launch((blocks,), (256,), data, y, n)
        expected = np.correlate(curve[data], taps, "valid")
        kernel.right(t, y, expected, f"y after filter<<<{blocks}, 256>>>, n = {n}")
    kernel.safe()
    t.at_most(
        counts.constant_replays,
        8 * 31,
        "extra passes over constant memory in one block",
        "一个线程块对常量内存的额外访问趟数",
    )
