import torch


def check(learner, t):
    for far in (0.0, 0.0, 1000.0):
        n, m, d = t.integers(1, 40), t.integers(2, 40), t.integers(1, 9)
        x, y = t.randn(n, d) + far, t.randn(m, d) + far
        exact = ((x.double()[:, None] - y.double()[None]) ** 2).sum(-1)
        place = f", around {far:g}" if far else ""
        t.close(
            learner.squared_distances(x, y),
            exact.float(),
            f"squared_distances(x [{n}, {d}], y [{m}, {d}]{place})",
            atol=1e-5,
        )
        t.equal(learner.nearest(x, y), exact.argmin(1), f"nearest(x [{n}, {d}], y [{m}, {d}]{place})")
    x = torch.zeros(3, 2)
    t.equal(
        learner.nearest(x, torch.ones(4, 2)), torch.zeros(3, dtype=torch.int64), "nearest where all are equally near"
    )
