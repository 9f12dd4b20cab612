"""Sums on rings of several sizes, with lengths that the ranks do not divide; then steps and bytes."""

import numpy as np


def check(learner, t):
    for n in (2, 3, 4, 7):
        for length in (n * t.integers(3, 9), n * t.integers(3, 9) + t.integers(1, n)):
            datas = [t.rng.integers(-1000, 1000, length).astype(np.float64) for _ in range(n)]
            total = np.sum(datas, axis=0)
            results, after, steps, sent = t.probe("run", datas)
            for rank in range(n):
                what = f"all_reduce of {length} numbers on {n} ranks: rank {rank}"
                t.equal(results[rank], total, what)
                t.unchanged(after[rank], datas[rank], "data")
    n, length = 5, 500 + t.integers(0, 5)
    datas = [t.rng.integers(-9, 9, length).astype(np.float64) for _ in range(n)]
    _, _, steps, sent = t.probe("run", datas)
    t.at_most(steps, 2 * (n - 1), f"steps on {n} ranks", f"{n} 个 rank 的步数")
    t.at_most(
        sent,
        2 * (n - 1) * -(-length // n) * 8,
        f"bytes sent by a rank for {length} numbers",
        f"一个 rank 为 {length} 个数发送的字节",
    )
