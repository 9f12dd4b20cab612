def check(learner, t):
    for B, H, S, T, D in (
        (1, 1, 32, 32, 16),
        (2, t.integers(2, 4), t.integers(20, 50), t.integers(33, 60), 16),
        (3, 1, 5, 40, 32),
    ):
        scale = float(t.rng.uniform(0.1, 2))
        q, k = t.randn(B, H, S, D), t.randn(B, H, T, D)
        expected = (scale * q.double() @ k.double().mT).float()
        shape = f"q [{B}, {H}, {S}, {D}], k [{B}, {H}, {T}, {D}]"
        t.close(learner.scores(q, k, scale), expected, f"scores(q, k, {scale:.3f}), {shape}", 1e-4, 1e-4)
        t.require(
            t.count("bytes_written") >= expected.nbytes,
            "no kernel of yours wrote the result",
            "结果不是由你的核函数写出的",
        )
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        t.close(
            learner.scores(q, k, scale),
            expected,
            f"scores(q, k, {scale:.3f}), {shape}, stride() == {q.stride()}, {k.stride()}",
            1e-4,
            1e-4,
        )
    t.at_most(t.count("bytes_written"), 4 * B * H * S * T, "bytes written", "写入的字节数")
