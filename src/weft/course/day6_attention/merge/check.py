import torch


def check(learner, t):
    S, D = t.integers(3, 7), t.integers(4, 9)
    cases = {
        "scores = randn": t.randn(S, 24),
        "scores = randn + 500": t.randn(S, 24) + 500,
        "scores = randn + 20 · arange": t.randn(S, 24) + 20 * torch.arange(24),
        "scores = randn - 20 · arange": t.randn(S, 24) - 20 * torch.arange(24),
        "scores = randn, -inf": torch.where(t.randn(S, 24) < 0, t.randn(S, 24), float("-inf")),
    }
    cases["scores = randn, -inf"][1:, :8] = float("-inf")
    cases["scores = randn, -inf"][:, 20] = 1.0
    for name, scores in cases.items():
        v = t.randn(24, D)
        expected = (torch.softmax(scores.double(), 1) @ v.double()).float()
        one = learner.of_block(scores, v)
        t.close(learner.output(one), expected, f"output(of_block(scores, v)), {name}", 1e-4, 1e-5)
        blocks = [learner.of_block(scores[:, a:b].clone(), v[a:b].clone()) for a, b in ((0, 8), (8, 16), (16, 24))]
        left = learner.merge(learner.merge(blocks[0], blocks[1]), blocks[2])
        t.close(learner.output(left), expected, f"output(merge(merge(s0, s1), s2)), {name}", 1e-4, 1e-5)
        right = learner.merge(blocks[2], learner.merge(blocks[1], blocks[0]))
        t.close(learner.output(right), expected, f"output(merge(s2, merge(s1, s0))), {name}", 1e-4, 1e-5)
    nothing = torch.full((S, 8), float("-inf"))
    unseen = learner.of_block(nothing, t.randn(8, D))
    t.close(learner.output(unseen), torch.zeros(S, D), "output(of_block(scores, v)), scores = -inf")
    merged = learner.merge(unseen, learner.of_block(nothing, t.randn(8, D)))
    t.close(learner.output(merged), torch.zeros(S, D), "output(merge(s0, s1)), scores = -inf")
    again = learner.merge(unseen, one)
    t.close(learner.output(again), expected, "output(merge(s0, s1)), scores = -inf | randn", 1e-4, 1e-5)
