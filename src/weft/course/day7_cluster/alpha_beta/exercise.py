"""
[en
The alpha-beta model: a message of S bytes takes alpha + S * beta seconds. Fit it to measurements, and predict an all-reduce.
en]
[zh
alpha-beta 模型：S 字节的消息用时 alpha + S * beta 秒。用测量值拟合它，再预测一次 all-reduce。
zh]
"""


# TODO(en): Fit alpha and beta by least squares of the *relative* errors: minimise the sum of ((alpha + beta S) / time - 1)².
#   Without the division a large message's noise of microseconds is as large as alpha itself, and alpha is lost.
#   With x = 1 / time and y = S / time this is alpha x + beta y ≈ 1: two linear equations,
#   alpha Σx² + beta Σxy = Σx and alpha Σxy + beta Σy² = Σy.
# TODO(zh): 用*相对*误差的最小二乘拟合 alpha 和 beta：使 ((alpha + beta S) / time - 1)² 之和最小。
#   如果不除以 time，大消息的噪声有好几微秒，和 alpha 一样大，alpha 就测不出来了。
#   令 x = 1 / time，y = S / time，就是 alpha x + beta y ≈ 1，得到两个线性方程：
#   alpha Σx² + beta Σxy = Σx，alpha Σxy + beta Σy² = Σy。
def fit(sizes: list[float], times: list[float]) -> tuple[float, float]:
    """sizes in bytes, times in seconds -> alpha in seconds, beta in seconds a byte."""
    # [skeleton
    #: return min(times), (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    # skeleton]
    # [solution
    x = [1 / t for t in times]
    y = [s / t for s, t in zip(sizes, times, strict=True)]
    xx, xy, yy = (sum(a * b for a, b in zip(p, q, strict=True)) for p, q in ((x, x), (x, y), (y, y)))
    determinant = xx * yy - xy * xy
    return (sum(x) * yy - sum(y) * xy) / determinant, (sum(y) * xx - sum(x) * xy) / determinant
    # solution]


# TODO(en): Seconds of a ring all-reduce of S bytes on n ranks: 2 (n - 1) steps, in each of which every rank sends S / n bytes.
# TODO(zh): n 个 rank 对 S 字节做环 all-reduce 的秒数：2 (n - 1) 步，每步每个 rank 发送 S / n 字节。
def ring_s(n: int, size: float, alpha: float, beta: float) -> float:
    # [skeleton
    #: return alpha + size * beta
    # skeleton]
    # [solution
    return 2 * (n - 1) * (alpha + size / n * beta)
    # solution]


# TODO(en): The size in bytes at which that ring spends as long on latency as on bytes. Smaller messages want fewer steps or
#   to be put together; larger ones want bandwidth.
# TODO(zh): 环上延迟所花的时间与传输字节所花的时间相等时的大小（字节）。更小的消息应当减少步数或合并，更大的消息要的是带宽。
def crossover(n: int, alpha: float, beta: float) -> float:
    # [skeleton
    #: return 0.0
    # skeleton]
    # [solution
    return n * alpha / beta
    # solution]


# TODO(en): The bus bandwidth in bytes a second of an all-reduce of S bytes that took ``seconds``: what each rank must send at
#   least, 2 (n - 1) / n · S, over the time. It can be compared with the link's rate, whatever n is.
# TODO(zh): S 字节的 all-reduce 用时 ``seconds`` 时的总线带宽（字节/秒）：每个 rank 至少要发送的 2 (n - 1) / n · S 除以时间。
#   无论 n 是多少，它都可以与链路速率比较。
def bus_bandwidth(n: int, size: float, seconds: float) -> float:
    # [skeleton
    #: return size / seconds
    # skeleton]
    # [solution
    return 2 * (n - 1) / n * size / seconds
    # solution]


# I AM NOT DONE
