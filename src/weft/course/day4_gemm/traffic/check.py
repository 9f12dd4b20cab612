def check(learner, t):
    for size in (2, 4):
        tile_m = 2 ** t.integers(4, 8)
        tile_n = tile_m * 2 ** t.integers(1, 3)
        m, n, k = tile_m * t.integers(2, 10), tile_n * t.integers(10, 30), t.integers(100, 9000)
        shape = f"{m}, {n}, {k}"
        t.predict(
            f"flops({shape})", learner.flops(m, n, k), 2 * m * n * k,
            "Each of the m · n results is a sum of k products.", "m · n 个结果，每个都是 k 个乘积之和。",
        )  # fmt: skip
        t.predict(
            f"bytes_at_least({shape}, {size})", learner.bytes_at_least(m, n, k, size), (m * k + k * n + m * n) * size,
            "Three matrices, each once.", "三个矩阵，各一次。",
        )  # fmt: skip
        t.predict(
            f"bytes_tiled({shape}, {size}, {tile_m}, {tile_n})",
            learner.bytes_tiled(m, n, k, size, tile_m, tile_n),
            ((m // tile_m) * (n // tile_n) * (tile_m + tile_n) * k + m * n) * size,
            "Count the tiles of C; each reads tile_m rows of A and tile_n columns of B, of k elements.",
            "数一数 C 有多少块；每块读 A 的 tile_m 行和 B 的 tile_n 列，每行每列 k 个元素。",
        )  # fmt: skip
    for ratio in (0.3, 0.9, 1.1, 4.0):  # time of the arithmetic over time of the bytes
        flop_per_s, bytes_per_s = 1e12 * t.integers(1, 1000), 1e9 * t.integers(20, 5000)
        moved = t.integers(10**6, 10**9)
        flop = int(ratio * moved / bytes_per_s * flop_per_s)
        machine = f"{flop}, {moved}, {flop_per_s:g}, {bytes_per_s:g}"
        t.predict(
            f"bound({machine})", learner.bound(flop, moved, flop_per_s, bytes_per_s), "compute" if ratio > 1 else "memory",
            "Compare the two times.", "比较两个时间。",
        )  # fmt: skip
        limit = max(flop / flop_per_s, moved / bytes_per_s) * 1e6
        t.predict(
            f"limit_us({machine})", learner.limit_us(flop, moved, flop_per_s, bytes_per_s), limit,
            "The two overlap: the longer one remains.", "两者重叠进行：剩下较长的那个。", within=1e-6,
        )  # fmt: skip
