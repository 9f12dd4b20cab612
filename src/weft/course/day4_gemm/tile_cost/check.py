def check(learner, t):
    for _ in range(3):
        tile_m, tile_n, tile_k = 2 ** t.integers(4, 9), 2 ** t.integers(4, 9), 2 ** t.integers(4, 8)
        m, n, warps, stages, size = t.integers(1, 5000), t.integers(1, 5000), 2 ** t.integers(1, 4), t.integers(2, 6), 2
        sms = t.integers(20, 150)
        tiles = -(-m // tile_m) * -(-n // tile_n)
        t.predict(
            f"accumulators_per_thread({tile_m}, {tile_n}, {warps})",
            learner.accumulators_per_thread(tile_m, tile_n, warps), tile_m * tile_n / (32 * warps),
            "The tile's elements, spread over all threads.", "把块的元素平分给所有线程。", within=1e-6,
        )  # fmt: skip
        t.predict(
            f"shared_bytes({tile_m}, {tile_n}, {tile_k}, {stages}, {size})",
            learner.shared_bytes(tile_m, tile_n, tile_k, stages, size), stages * (tile_m + tile_n) * tile_k * size,
            "A stage holds a tile of A and a tile of B.", "每一级存放 A 的一块和 B 的一块。",
        )  # fmt: skip
        t.predict(
            f"useful_share({m}, {n}, {tile_m}, {tile_n})",
            learner.useful_share(m, n, tile_m, tile_n), m * n / (tiles * tile_m * tile_n),
            "Elements of C over elements of all tiles.", "C 的元素数除以所有块的元素数。", within=1e-6,
        )  # fmt: skip
        t.predict(
            f"wave_share({m}, {n}, {tile_m}, {tile_n}, {sms})",
            learner.wave_share(m, n, tile_m, tile_n, sms), tiles / (-(-tiles // sms) * sms),
            "Tiles over tiles that all waves had room for.", "块数除以所有波容得下的块数。", within=1e-6,
        )  # fmt: skip
