import torch


def check(learner, t):
    for Z, S, D, m, n in (
        (1, 32, 16, 32, 32),
        (2, t.integers(65, 95), 16, 32, 32),
        (1, t.integers(65, 95), 32, 64, 16),
        (2, t.integers(65, 95), 16, 16, 64),
    ):
        scale = 3 * D**-0.5
        q, k, v = t.randn(Z, S, D), t.randn(Z, S, D), t.randn(Z, S, D)
        seen = torch.ones(S, S, dtype=torch.bool).tril()
        scores = (scale * q.double() @ k.double().mT).masked_fill(~seen, float("-inf"))
        what = f"attention(q, k, v, {scale:.2f}, m={m}, n={n}), [{Z}, {S}, {D}]"
        result = learner.attention(q, k, v, scale, m, n)
        t.require(
            isinstance(result, tuple) and len(result) == 2, "attention returns (o, lse)", "attention 返回 (o, lse)"
        )
        t.close(result[0], (torch.softmax(scores, -1) @ v.double()).float(), f"o, {what}", 1e-3, 1e-4)
        t.require(
            t.count("bytes_written") >= result[0].nbytes,
            "no kernel of yours wrote the result",
            "结果不是由你的核函数写出的",
        )
        t.close(result[1], torch.logsumexp(scores, -1).float(), f"lse, {what}", 1e-4, 1e-4)
    S = 128
    q, k, v = t.randn(1, S, D), t.randn(1, S, D), t.randn(1, S, D)
    learner.attention(q, k, v, scale, 32, 32)
    tiles = 1 + 2 + 3 + 4  # of 32 x 32 that hold a score that is seen, of 16
    limit = 4 * (S * D + tiles * 2 * 32 * D)
    t.at_most(
        t.count("bytes_read"),
        limit,
        "bytes read for 128 queries: 10 of 16 tiles",
        "128 个查询读取的字节数：16 块中的 10 块",
    )
