import torch


def check(learner, t):
    cases = [
        (1, 32, 32, 16, 1.0),
        (2, t.integers(33, 60), t.integers(65, 90), 16, 1.0),
        (2, 1, t.integers(40, 90), 32, 1.0),
        (2, t.integers(20, 31), t.integers(70, 90), 16, 40.0),
    ]
    for Z, S, T, D, size in cases:
        scale = D**-0.5 * size
        q, k, v = t.randn(Z, S, D), t.randn(Z, T, D), t.randn(Z, T, D)
        scores = scale * q.double() @ k.double().mT
        what = f"attention(q, k, v, {scale:.2f}), q [{Z}, {S}, {D}], k, v [{Z}, {T}, {D}]"
        o, lse = torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)
        result = learner.attention(q, k, v, scale)
        t.require(
            isinstance(result, tuple) and len(result) == 2, "attention returns (o, lse)", "attention 返回 (o, lse)"
        )
        t.close(result[0], o.float(), f"o, {what}", 1e-3, 1e-4)
        t.require(
            t.count("bytes_written") >= result[0].nbytes,
            "no kernel of yours wrote the result",
            "结果不是由你的核函数写出的",
        )
        t.close(result[1], lse.float(), f"lse, {what}", 1e-4, 1e-4)
    tiles = -(-S // 32)
    t.at_most(t.count("bytes_written"), 4 * Z * (S * D + S), "bytes written: no scores", "写入的字节数：没有分数")
    t.at_most(t.count("bytes_read"), 4 * Z * (S * D + tiles * 2 * T * D), "bytes read", "读取的字节数")
