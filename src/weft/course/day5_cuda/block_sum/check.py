"""Sums of whole numbers; races; what the warps had to do, and bank conflicts."""

import numpy as np

from weft.learn import cuda


def check(learner, t):
    kernel = cuda.kernel(t, "block_sum")
    blocks = t.integers(2, 4)
    x = t.rng.integers(-99, 99, (blocks, 256)).astype(np.float32)
    y = np.full(blocks, np.nan, np.float32)
    counts = kernel.launch((blocks,), (256,), x, y)
    kernel.right(t, y, x.sum(1), f"y after block_sum of {blocks} blocks")
    kernel.safe()
    t.at_most(
        counts.conflicts, 0, "extra passes over shared memory (bank conflicts)", "共享内存多出的趟数（bank 冲突）"
    )
    accesses = "accesses of a block's warps to shared memory"
    t.at_most(counts.shared_accesses / blocks, 60, accesses, "一个线程块的 warp 访问共享内存的次数")
    t.note(
        f"{counts.issued // blocks} instructions issued by a block",
        f"一个线程块发射了 {counts.issued // blocks} 条指令",
    )


def fast(learner, t):
    blocks = 1 << 17
    x, y = t.rng.integers(-9, 9, (blocks, 256)).astype(np.float32), np.zeros(blocks, np.float32)
    cuda.kernel(t, "block_sum").timed(t, (blocks,), (256,), [x, y], {1: x.sum(1)}, at_least=0.14, blocks=blocks)
