CONFIGS = [
    (16, 64, 64, 4, 4), (16, 128, 128, 4, 4), (32, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 3, 4),
    (128, 64, 64, 3, 4), (128, 128, 64, 3, 8), (128, 128, 64, 4, 4), (128, 256, 64, 3, 8), (256, 128, 64, 4, 8),
    (256, 256, 64, 2, 8), (128, 256, 128, 4, 8), (64, 256, 32, 4, 4),
]  # fmt: skip


def expected_us(config, m, n, k, machine):
    tile_m, tile_n, tile_k, _, _ = config
    tiles = -(-m // tile_m) * -(-n // tile_n)
    steps = -(-k // tile_k)
    waves = -(-tiles // machine["multiprocessors"])
    one_tile_s = 2 * tile_m * tile_n * tile_k * steps * machine["multiprocessors"] / machine["flop_per_s"]
    traffic_s = tiles * steps * (tile_m * tile_k + tile_k * tile_n) * 2 / machine["l2_bytes_per_s"]
    return 1e6 * max(waves * one_tile_s, traffic_s)


def check(learner, t):
    sms = t.integers(40, 150)
    fast = {"multiprocessors": sms, "flop_per_s": 1e12 * t.integers(60, 900), "l2_bytes_per_s": 1e12 * t.integers(2, 8)}
    slow_l2 = {**fast, "flop_per_s": 900e12, "l2_bytes_per_s": 5e11}
    for machine, shared_kib in (
        (fast, t.integers(100, 227)),
        (slow_l2, 227),
    ):  # 227: registers alone forbid a tile of 256 x 256
        machine |= {"shared_bytes": 1024 * shared_kib, "accumulators": 128}
        _check(learner, t, [CONFIGS[i] for i in t.rng.permutation(len(CONFIGS))], machine)


def _check(learner, t, configs, machine):
    for config in configs:
        tile_m, tile_n, tile_k, stages, warps = config
        fit = stages * (tile_m * tile_k + tile_k * tile_n) * 2 <= machine["shared_bytes"]
        fit = fit and tile_m * tile_n <= machine["accumulators"] * 32 * warps
        t.equal(learner.fits(config, machine), fit, f"fits({config}, machine), machine = {machine}")
    middle = [t.integers(500, 3000) for _ in range(3)]
    for m, n, k in ((t.integers(1, 17), 4096, 4096), middle, (8192, 8192, 8192)):
        for config in configs:
            what = f"predicted_us({config}, {m}, {n}, {k}, machine), machine = {machine}"
            t.close(learner.predicted_us(config, m, n, k, machine), expected_us(config, m, n, k, machine), what, 1e-6)
        candidates = [c for c in configs if learner.fits(c, machine)]
        best = sorted(expected_us(c, m, n, k, machine) for c in candidates)[:3]
        got = learner.worth_measuring(configs, m, n, k, machine, 3)
        fit = isinstance(got, list) and all(c in candidates for c in got)
        t.require(fit, f"{got} is not a list of configurations that fit", f"{got} 不是由放得下的配置组成的列表")
        what = f"[predicted_us(c, …) for c in worth_measuring(configs, {m}, {n}, {k}, machine, 3)]"
        t.close([expected_us(c, m, n, k, machine) for c in got], best, what, 1e-6)
