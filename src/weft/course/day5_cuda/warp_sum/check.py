"""Rows of whole numbers, so that any order gives the same sum; then what was used."""

import numpy as np

from weft.learn import cuda


def check(learner, t):
    kernel = cuda.kernel(t, "row_sums")
    for M, N in ((4, 32), (t.integers(5, 8), t.integers(33, 200)), (9, t.integers(1, 31)), (1, 64)):
        x = t.rng.integers(-50, 50, (M, N)).astype(np.float32)
        y = np.zeros(M, np.float32)
        counts = kernel.launch((-(-M // 4),), (128,), x, y, M, N)
        kernel.right(t, y, x.sum(1), f"y after row_sums of x [{M}, {N}]")
    kernel.safe()
    x, y = np.ones((8, 256), np.float32), np.zeros(8, np.float32)
    counts = kernel.launch((2,), (128,), x, y, 8, 256)
    t.at_most(counts.atomics_global + counts.atomics_shared, 0, "atomics", "原子操作次数")
    t.at_most(counts.shared_accesses, 0, "accesses to shared memory", "共享内存访问次数")
    t.at_most(
        counts.sectors_read,
        8 * 256 // 8,
        "32-byte sectors read for 8 rows of 256",
        "读取 8 行、每行 256 个元素的 32 字节扇区数",
    )


def fast(learner, t):
    M, N = 16384, 2048
    x, y = t.rng.integers(-9, 9, (M, N)).astype(np.float32), np.zeros(M, np.float32)
    cuda.kernel(t, "row_sums").timed(t, (M // 4,), (128,), [x, y, M, N], {1: x.sum(1)}, at_least=0.45, M=M, N=N)
