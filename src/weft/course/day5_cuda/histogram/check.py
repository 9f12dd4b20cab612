"""Counts of random and of equal bytes; races; global atomics."""

import numpy as np

from weft.learn import cuda


def check(learner, t):
    kernel = cuda.kernel(t, "histogram")
    for blocks, n, most in ((3, t.integers(900, 1500), 256), (1, t.integers(100, 400), 256), (4, 700, 3)):
        data = t.rng.integers(0, most, n).astype(np.uint8)
        bins = np.zeros(256, np.uint32)
        counts = kernel.launch((blocks,), (128,), data, n, bins)
        expected = np.bincount(data, minlength=256).astype(np.uint32)
        kernel.right(t, bins, expected, f"bins after histogram<<<{blocks}, 128>>> of {n} bytes below {most}")
    kernel.safe()
    t.at_most(
        counts.atomics_global,
        4 * 3,
        "global atomics for 700 bytes of 3 values in 4 blocks",
        "4 个线程块、700 个字节、3 种取值时的全局原子操作数",
    )


def fast(learner, t):
    n = 1 << 27
    data = t.rng.integers(0, 256, n, np.uint8)
    expected = np.bincount(data, minlength=256).astype(np.uint32)
    bins = np.zeros(256, np.uint32)
    cuda.kernel(t, "histogram").timed(t, (2048,), (128,), [data, n, bins], {2: expected}, at_least=0.1, n=n)
