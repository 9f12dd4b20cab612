import torch


def check(learner, t):
    S, D = t.integers(3, 7), t.integers(4, 9)
    cases = {
        "random scores": t.randn(S, 24),
        "scores around 500": t.randn(S, 24) + 500,
        "rising scores": t.randn(S, 24) + 20 * torch.arange(24),
        "falling scores": t.randn(S, 24) - 20 * torch.arange(24),
        "causal, first block unseen by some": torch.where(torch.rand(S, 24) < 0.5, t.randn(S, 24), float("-inf")),
    }
    cases["causal, first block unseen by some"][1:, :8] = float("-inf")
    cases["causal, first block unseen by some"][:, 20] = 1.0
    for name, scores in cases.items():
        v = t.randn(24, D)
        expected = (torch.softmax(scores.double(), 1) @ v.double()).float()
        one = learner.of_block(scores, v)
        t.close(learner.output(one), expected, f"output(of_block(scores, v)), {name}", 1e-4, 1e-5)
        blocks = [learner.of_block(scores[:, a:b].clone(), v[a:b].clone()) for a, b in ((0, 8), (8, 16), (16, 24))]
        left = learner.merge(learner.merge(blocks[0], blocks[1]), blocks[2])
        t.close(learner.output(left), expected, f"output of three blocks merged from the left, {name}", 1e-4, 1e-5)
        right = learner.merge(blocks[2], learner.merge(blocks[1], blocks[0]))
        t.close(learner.output(right), expected, f"output of three blocks merged from the right, {name}", 1e-4, 1e-5)
    nothing = torch.full((S, 8), float("-inf"))
    unseen = learner.of_block(nothing, t.randn(8, D))
    t.close(learner.output(unseen), torch.zeros(S, D), "output of a block in which no key is seen")
    merged = learner.merge(unseen, learner.of_block(nothing, t.randn(8, D)))
    t.close(learner.output(merged), torch.zeros(S, D), "output of two blocks in which no key is seen")
    again = learner.merge(unseen, one)
    t.close(learner.output(again), expected, "a state merged with one that has seen nothing", 1e-4, 1e-5)
