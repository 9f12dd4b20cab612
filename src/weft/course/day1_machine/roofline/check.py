def check(learner, t):
    for _ in range(8):
        m, n, k = (int(2**x) for x in t.rng.uniform(0, 13, 3))
        size = int(t.rng.integers(1, 5))
        flops, moved = 2 * m * n * k, size * (m * k + k * n + m * n)
        t.equal(learner.matmul_cost(m, n, k, size), (flops, moved), f"matmul_cost({m}, {n}, {k}, size={size})")
        bandwidth, peak = float(t.rng.uniform(1e10, 5e12)), float(t.rng.uniform(1e11, 1e15))
        what = f"({flops}, {moved}, {bandwidth:.3g}, {peak:.3g})"
        t.close(
            learner.attainable(flops, moved, bandwidth, peak), min(peak, bandwidth * flops / moved), "attainable" + what
        )
        t.close(
            learner.seconds(flops, moved, bandwidth, peak),
            max(flops / peak, moved / bandwidth),
            "seconds" + what,
            atol=0,
        )
    for flops, expected in ((1e9, 1e12), (1e12, 5e12)):
        got = learner.attainable(flops, 1e9, 1e12, 5e12)
        t.close(got, expected, f"attainable({flops:g}, 1e9, 1e12, 5e12)")
    t.close(learner.seconds(0, 4.8e9, 4.8e12, 1e15), 1e-3, "seconds(0, 4.8e9, 4.8e12, 1e15), a copy", atol=0)
    bandwidth, peak = 4.8e12, 989e12
    t.predict(
        "LARGE", learner.LARGE, "compute", "Its intensity is 4096 / 3 FLOP/byte.", "它的强度是 4096 / 3 FLOP/byte。"
    )
    t.predict("ONE_TOKEN", learner.ONE_TOKEN, "memory", "Each weight is used once.", "每个权重只用一次。")
    t.predict(
        "RIDGE_N",
        learner.RIDGE_N,
        3 * peak / bandwidth,
        "2·n³ FLOPs over 3·n²·2 bytes; set it equal to the ridge.",
        "2·n³ 次 FLOP 除以 3·n²·2 字节；令它等于脊点。",
        within=0.05,
    )
    tokens = next(m for m in range(1, 4096) if 2 * m * 4096**2 / peak >= 2 * (2 * m * 4096 + 4096**2) / bandwidth)
    t.predict(
        "TOKENS",
        learner.TOKENS,
        tokens,
        "With few rows, the bytes are almost those of the weights alone: intensity = rows.",
        "行数少时，字节几乎全是权重：强度 = 行数。",
        within=0.2,
    )
    machine = "one H200, by its data sheet"
    t.note(
        f"ridge at {peak / bandwidth:.0f} FLOP/byte ({machine})",
        f"脊点在 {peak / bandwidth:.0f} FLOP/byte（H200 标称值）",
    )
