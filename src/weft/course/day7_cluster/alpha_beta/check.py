"""Fits to noisy measurements from 8 bytes to 1 GB; formulas at random sizes."""


def relative_fit(sizes, times):
    x = [1 / t for t in times]
    y = [s / t for s, t in zip(sizes, times, strict=True)]
    xx, xy, yy = (sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((x, x), (x, y), (y, y)))
    determinant = xx * yy - xy * xy
    return (sum(x) * yy - sum(y) * xy) / determinant, (sum(y) * xx - sum(x) * xy) / determinant


def check(learner, t):
    for _ in range(4):
        n = t.integers(3, 17)
        alpha, beta = float(t.rng.uniform(2e-6, 40e-6)), 1 / float(t.rng.uniform(1e9, 400e9))
        sizes = [float(8 << (2 * i)) for i in range(14)]
        times = [(alpha + s * beta) * float(e) for s, e in zip(sizes, t.rng.normal(1, 0.02, 14), strict=True)]
        got = learner.fit(sizes, times)
        what = f"fit of 14 sizes, alpha {alpha * 1e6:.1f} µs, {1e-9 / beta:.0f} GB/s, 2 % noise"
        t.close(got[0], relative_fit(sizes, times)[0], f"{what}: alpha", rtol=1e-6, atol=0)
        t.close(got[1], relative_fit(sizes, times)[1], f"{what}: beta", rtol=1e-6, atol=0)
        size = float(t.integers(1, 10**9))
        seconds = 2 * (n - 1) * (alpha + size / n * beta)
        words = f"alpha={alpha:.2e}, beta={beta:.2e}"
        t.close(learner.ring_s(n, size, alpha, beta), seconds, f"ring_s({n}, {size:.0f}, {words})", rtol=1e-9, atol=0)
        t.close(learner.crossover(n, alpha, beta), n * alpha / beta, f"crossover({n}, {words})", rtol=1e-9, atol=0)
        bus = 2 * (n - 1) / n * size / seconds
        what = f"bus_bandwidth({n}, {size:.0f}, {seconds:.3g})"
        t.close(learner.bus_bandwidth(n, size, seconds), bus, what, rtol=1e-9, atol=0)
