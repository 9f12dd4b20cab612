from weft.learn import memory_model


def check(learner, t):
    cases = [
        (0, 1, 32),
        (0, 2, 32),
        (0, 8, 32),
        (0, 100, 32),
        (64, 0, 32),
        (4, 1, 32),
        (30, 1, 32),
        (0, 1, 8),
        (0, 1, 1),
    ]
    cases += [(int(t.rng.integers(5000)), int(t.rng.integers(40)), int(t.rng.integers(1, 33))) for _ in range(8)]
    for start, stride, lanes in cases:
        expected = [start + 4 * stride * i for i in range(lanes)]
        t.equal(learner.addresses(start, stride, lanes), expected, f"addresses({start}, {stride}, {lanes})")
        moved = memory_model.sectors(expected)
        t.equal(learner.sectors(expected), moved, f"sectors(addresses({start}, {stride}, {lanes}))")
        asked = len({a + b for a in expected for b in range(4)})
        t.close(
            learner.used_share(expected), asked / (32 * moved), f"used_share(addresses({start}, {stride}, {lanes}))"
        )
    scattered = [int(a) for a in t.rng.integers(0, 4096, 32)]
    t.equal(learner.sectors(scattered), memory_model.sectors(scattered), f"sectors({scattered})")
