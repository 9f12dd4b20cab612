def check(learner, t):
    for size in (2, 4):
        B, H, S, T, D = (
            t.integers(1, 9),
            t.integers(1, 33),
            t.integers(100, 9000),
            t.integers(100, 9000),
            t.integers(32, 257),
        )
        shape = f"{B}, {H}, {S}, {T}, {D}"
        t.predict(
            f"flops({shape})", learner.flops(B, H, S, T, D), 4 * B * H * S * T * D,
            "Two matrix products for each head, each 2 · S · T · D.", "每个头两次矩阵乘法，每次 2 · S · T · D。",
        )  # fmt: skip
        t.predict(
            f"scores_bytes({B}, {H}, {S}, {T})", learner.scores_bytes(B, H, S, T), 4 * B * H * S * T,
            "One score of 4 bytes for each pair of query and key of each head.", "每个头的每一对查询与键有一个 4 字节的分数。",
        )  # fmt: skip
        scores, queries, keys = B * H * S * T, B * H * S * D, B * H * T * D
        t.predict(
            f"bytes_standard({shape}, {size})", learner.bytes_standard(B, H, S, T, D, size),
            2 * 4 * scores + 2 * size * scores + 2 * size * (queries + keys),
            "Scores go out and in with 4 bytes, p out and in with `size`; q, k, v and the output once each.",
            "分数以 4 字节写出再读入，p 以 `size` 字节写出再读入；q、k、v 和输出各一次。",
        )  # fmt: skip
        t.predict(
            f"bytes_fused({shape}, {size})", learner.bytes_fused(B, H, S, T, D, size), 2 * size * (queries + keys),
            "q and the output have S rows, k and v have T.", "q 和输出有 S 行，k 和 v 有 T 行。",
        )  # fmt: skip
        t.predict(
            f"causal_share({S})", learner.causal_share(S), (S + 1) / (2 * S),
            "1 + 2 + … + S of S · S.", "S · S 中的 1 + 2 + … + S。", within=1e-9,
        )  # fmt: skip
