# TODO(en): Before any kernel: what must C = A B cost? A is [m, k], B [k, n], C [m, n], elements of `size` bytes.
# Fill in the five functions. Nothing here is measured; the next exercises are judged against these numbers.
# TODO(zh): 写核函数之前先问：C = A B 至少要花多少？A 是 [m, k]，B 是 [k, n]，C 是 [m, n]，每个元素 `size` 字节。
# 请填写这五个函数。这里什么也不测；后面的练习都以这些数为准绳。
# I AM NOT DONE


def flops(m: int, n: int, k: int) -> int:
    """
    [en
    Multiplications and additions, counted one each.
    en]
    [zh
    乘法和加法各算一次。
    zh]
    """
    # [solution
    return 2 * m * n * k
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def bytes_at_least(m: int, n: int, k: int, size: int) -> int:
    """
    [en
    Each element of A and B read once, each of C written once.
    en]
    [zh
    A 和 B 的每个元素读一次，C 的每个元素写一次。
    zh]
    """
    # [solution
    return (m * k + k * n + m * n) * size
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def bytes_tiled(m: int, n: int, k: int, size: int, tile_m: int, tile_n: int) -> int:
    """
    [en
    A program makes a tile of C [tile_m, tile_n]: it reads its tile_m rows of A and its tile_n columns of B.

    Nothing is shared between programs. m is a multiple of tile_m, n of tile_n. C is written once.
    en]
    [zh
    一个实例负责 C 的一块 [tile_m, tile_n]：它读 A 的 tile_m 行和 B 的 tile_n 列。

    实例之间什么也不共享。m 是 tile_m 的整数倍，n 是 tile_n 的整数倍。C 写一次。
    zh]
    """
    # [solution
    a = m * k * (n // tile_n)  # all of A, once for each column of tiles
    b = k * n * (m // tile_m)  # all of B, once for each row of tiles
    return (a + b + m * n) * size
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def bound(flop: int, moved: int, flop_per_s: float, bytes_per_s: float) -> str:
    """
    [en
    The bound: "compute" where arithmetic takes longer than moving the bytes, else "memory".
    en]
    [zh
    计算所需时间比搬运字节长时返回 "compute"，否则返回 "memory"。
    zh]
    """
    # [solution
    return "compute" if flop / flop_per_s > moved / bytes_per_s else "memory"
    # solution]
    # [skeleton
    #: return ""
    # skeleton]


def limit_us(flop: int, moved: int, flop_per_s: float, bytes_per_s: float) -> float:
    """
    [en
    No kernel is faster than this, in microseconds. Arithmetic and transfers overlap.
    en]
    [zh
    任何核函数都不会比它快，单位是微秒。计算与搬运重叠进行。
    zh]
    """
    # [solution
    return max(flop / flop_per_s, moved / bytes_per_s) * 1e6
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]
