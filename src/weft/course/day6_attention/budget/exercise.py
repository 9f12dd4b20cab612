# TODO(en): Before the first kernel: what does attention cost, written as three kernels, and what fused into one?
# B batch, H heads, S queries, T keys, D elements of a head; elements of `size` bytes, scores of 4 (float32).
# TODO(zh): 写第一个核函数之前先问：注意力写成三个核函数要花多少？融合成一个又要花多少？
# B 批大小，H 头数，S 个查询（query），T 个键（key），每头 D 个元素；元素 `size` 字节，分数 4 字节（float32）。
# I AM NOT DONE


def flops(B: int, H: int, S: int, T: int, D: int) -> int:
    """The two matrix products, q kᵀ and p v; the softmax between them is not counted."""
    # [solution
    return 4 * B * H * S * T * D
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def scores_bytes(B: int, H: int, S: int, T: int) -> int:
    """Memory that the matrix of scores takes, in float32."""
    # [solution
    return 4 * B * H * S * T
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def bytes_standard(B: int, H: int, S: int, T: int, D: int, size: int) -> int:
    """Three kernels: q kᵀ writes scores; softmax reads scores and writes p, of `size` bytes; p v reads p and writes the output.

    Each kernel reads its inputs once and writes its output once.
    """
    # [solution
    head = (S * D + T * D) * size + S * T * 4  # q, k in; scores out
    head += S * T * 4 + S * T * size  # scores in; p out
    head += (S * T + T * D + S * D) * size  # p, v in; output out
    return B * H * head
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def bytes_fused(B: int, H: int, S: int, T: int, D: int, size: int) -> int:
    """One kernel that reads q, k and v once and writes the output once."""
    # [solution
    return B * H * 2 * (S * D + T * D) * size
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def causal_share(S: int) -> float:
    """The part of all S x S scores that causal attention needs: query i sees the keys 0 … i."""
    # [solution
    return (S + 1) / (2 * S)
    # solution]
    # [skeleton
    #: return 1.0
    # skeleton]
