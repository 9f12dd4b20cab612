"""Random layers and links; every bucket's size, the step, what is exposed, and the best size."""


def simulated(forward_s, layers, bucket_bytes, alpha, beta):
    finished, total = [], forward_s
    for seconds, size in layers:
        total += seconds
        finished.append((total, size))
    buckets, held = [], 0
    for i, (at, size) in enumerate(finished):
        held += size
        if held and (held >= bucket_bytes or i == len(finished) - 1):
            buckets.append((at, held))
            held = 0
    free = 0.0
    for at, size in buckets:
        free = max(at, free) + alpha + beta * size
    return max(total, free), max(0.0, free - total), [size for _, size in buckets]


def check(learner, t):
    for case in range(6):
        layers = [(float(t.rng.uniform(1e-4, 3e-3)), t.integers(1, 40) << 20) for _ in range(t.integers(4, 12))]
        if case == 1:
            layers[-1] = (1e-3, 0)  # a layer without parameters
        if case == 2:
            layers[-1] = (1e-4, 200 << 20)  # an embedding
        alpha, beta = float(t.rng.uniform(5e-6, 3e-4)), 1 / float(t.rng.uniform(5e9, 200e9))
        sizes = [1, 5 << 20, 25 << 20, 100 << 20, 1 << 40]
        forward_s = 2e-3
        true = [simulated(forward_s, layers, size, alpha, beta) for size in sizes]
        steps, best, sent = t.probe("run", forward_s, layers, sizes, alpha, beta)
        for size, got, (step, exposed, _) in zip(sizes, steps, true, strict=True):
            what = f"step({forward_s}, {len(layers)} layers, bucket_bytes={size:,}, comm)"
            t.close(got[0], step, f"{what}[0]", rtol=1e-9, atol=0)
            t.close(got[1], exposed, f"{what}[1]", rtol=1e-6, atol=1e-12)
        t.equal(sent, [b for *_, buckets in true for b in buckets], "the bytes of the buckets, as comm was called")
        chosen = min(zip(sizes, true, strict=True), key=lambda p: (p[1][0], -p[0]))[0]
        t.equal(best, chosen, f"best_bucket(…, {sizes}, comm)")
