# TODO(en): Before the first kernel: what does attention cost, written as three kernels, and what fused into one?
# B batch, H heads, S queries, T keys, D elements of a head; elements of `size` bytes, scores of 4 (float32).
# TODO(zh): 写第一个核函数之前先问：注意力写成三个核函数要花多少？融合成一个又要花多少？
# B 批大小，H 头数，S 个查询（query），T 个键（key），每头 D 个元素；元素 `size` 字节，分数 4 字节（float32）。
# I AM NOT DONE


def flops(B: int, H: int, S: int, T: int, D: int) -> int:
    """
    [en
    The two matrix products, q kᵀ and p v; the softmax between them is not counted.
    en]
    [zh
    两次矩阵乘法 q kᵀ 和 p v；中间的 softmax 不计。
    zh]
    """
    # [solution
    return 4 * B * H * S * T * D
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def scores_bytes(B: int, H: int, S: int, T: int) -> int:
    """
    [en
    Memory that the matrix of scores takes, in float32.
    en]
    [zh
    分数矩阵占用的内存，float32。
    zh]
    """
    # [solution
    return 4 * B * H * S * T
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def bytes_standard(B: int, H: int, S: int, T: int, D: int, size: int) -> int:
    """
    [en
    Three kernels: q kᵀ writes scores; softmax reads scores and writes p, of `size` bytes; p v reads p and writes the output.

    Each kernel reads its inputs once and writes its output once.
    en]
    [zh
    三个核函数：q kᵀ 写出分数；softmax 读分数、写 p（每个 `size` 字节）；p v 读 p、写输出。

    每个核函数的输入读一次，输出写一次。
    zh]
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
    """
    [en
    One kernel that reads q, k and v once and writes the output once.
    en]
    [zh
    一个核函数：q、k、v 各读一次，输出写一次。
    zh]
    """
    # [solution
    return B * H * 2 * (S * D + T * D) * size
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def causal_share(S: int) -> float:
    """
    [en
    The part of all S x S scores that causal attention needs: query i sees the keys 0 … i.
    en]
    [zh
    因果注意力需要的分数占全部 S x S 个的比例：查询 i 只看键 0 … i。
    zh]
    """
    # [solution
    return (S + 1) / (2 * S)
    # solution]
    # [skeleton
    #: return 1.0
    # skeleton]
