"""
[en
    attainable FLOP/s = min(peak, bandwidth × intensity)          intensity = FLOPs / bytes

Fill in the functions, then predict for one H200: 4.8e12 bytes/s, 989e12 FLOP/s (bf16 matrix products), each input read once, each
output written once, 2 bytes an element.
en]
[zh
    可达到的 FLOP/s = min(峰值, 带宽 × 强度)          强度 = FLOP 数 / 字节数

填写函数，然后为一块 H200 预测：4.8e12 字节/秒，989e12 FLOP/s（bf16 矩阵乘法），每个输入读一次，每个输出写一次，每个元素 2 字节。
zh]
"""

# I AM NOT DONE


def attainable(flops, bytes_moved, bandwidth, peak):
    # TODO(en): FLOP/s that a machine can reach on this work. `bandwidth` in bytes/s, `peak` in FLOP/s.
    # TODO(zh): 机器在这项工作上能达到的 FLOP/s。`bandwidth` 单位为字节/秒，`peak` 单位为 FLOP/s。
    # [solution
    return min(peak, bandwidth * flops / bytes_moved)
    # solution]
    # [skeleton
    #: return peak
    # skeleton]


def seconds(flops, bytes_moved, bandwidth, peak):
    # TODO(en): the least time for this work; also for work without any FLOPs (a copy).
    # TODO(zh): 这项工作的最短时间；对没有 FLOP 的工作（拷贝）也要成立。
    # [solution
    return max(flops / peak, bytes_moved / bandwidth)
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]


def matmul_cost(m, n, k, size=2):
    # TODO(en): FLOPs and bytes of a product of m × k and k × n: a pair. One multiplication and one addition for each term.
    # TODO(zh): m × k 与 k × n 相乘的 FLOP 数和字节数：返回一对。每一项是一次乘法和一次加法。
    # [solution
    return 2 * m * n * k, size * (m * k + k * n + m * n)
    # solution]
    # [skeleton
    #: return m * n * k, size * m * n
    # skeleton]


# TODO(en): "memory" or "compute": what limits the product of two 4096 × 4096 matrices?
# TODO(zh): "memory" 或 "compute"：两个 4096 × 4096 矩阵相乘受什么限制？
# [solution
LARGE = "compute"
# solution]
# [skeleton
#: LARGE = None
# skeleton]

# TODO(en): and a vector times a matrix, 1 × 4096 times 4096 × 4096 (a language model that writes one token)?
# TODO(zh): 向量乘矩阵，1 × 4096 乘 4096 × 4096（语言模型写出一个 token）呢？
# [solution
ONE_TOKEN = "memory"
# solution]
# [skeleton
#: ONE_TOKEN = None
# skeleton]

# TODO(en): for n × n times n × n: from which n on is it limited by compute? Within 5 %.
# TODO(zh): n × n 乘 n × n：从多大的 n 起受计算限制？误差 5 % 以内。
# [solution
RIDGE_N = 3 * 989e12 / 4.8e12
# solution]
# [skeleton
#: RIDGE_N = None
# skeleton]

# TODO(en): how many tokens must be written at once (the rows of `ONE_TOKEN`) until the product is no longer limited by reading the weights? Within 20 %.
# TODO(zh): 同时写出多少个 token（即 `ONE_TOKEN` 的行数）时，读权重就不再是瓶颈？误差 20 % 以内。
# [solution
TOKENS = 230
# solution]
# [skeleton
#: TOKENS = None
# skeleton]
