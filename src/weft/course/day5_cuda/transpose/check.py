"""Sizes that 32 does not divide; bounds and races; sectors and bank conflicts on whole tiles."""

import numpy as np

from weft.learn import cuda


def check(learner, t):
    kernel = cuda.kernel(t, "transpose")
    for M, N in ((32, 32), (t.integers(33, 60), t.integers(65, 90)), (t.integers(65, 90), t.integers(3, 31))):
        x = t.rng.standard_normal((M, N)).astype(np.float32)
        y = np.full((N, M), np.nan, np.float32)
        kernel.launch((-(-N // 32), -(-M // 32)), (32, 8), x, y, M, N)
        kernel.right(t, y, np.ascontiguousarray(x.T), f"y after transpose of x [{M}, {N}]")
    kernel.safe()
    M, N = 64, 96
    x, y = t.rng.standard_normal((M, N)).astype(np.float32), np.zeros((N, M), np.float32)
    counts = kernel.launch((3, 2), (32, 8), x, y, M, N)
    least = M * N // 8
    t.at_most(counts.sectors_read, least, "32-byte sectors read for 64 × 96", "读取 64 × 96 的 32 字节扇区数")
    t.at_most(counts.sectors_written, least, "32-byte sectors written", "写入的 32 字节扇区数")
    t.at_most(
        counts.conflicts, 0, "extra passes over shared memory (bank conflicts)", "共享内存多出的趟数（bank 冲突）"
    )


def fast(learner, t):
    M, N = 4096, 8192
    x, y = t.rng.standard_normal((M, N), np.float32), np.zeros((N, M), np.float32)
    expected = np.ascontiguousarray(x.T)
    cuda.kernel(t, "transpose").timed(
        t, (N // 32, M // 32), (32, 8), [x, y, M, N], {1: expected}, at_least=0.5, M=M, N=N
    )
