# TODO(en): A larger tile moves fewer bytes, and costs: registers for its accumulators, shared memory for the stages in flight,
# padding at the edges, and multiprocessors that idle in the last wave. Work out each cost.
# TODO(zh): 块越大，搬运的字节越少，但有代价：累加器占寄存器，在途的各级（stage）占共享内存，边缘要填充，最后一波（wave）里
# 有流多处理器（multiprocessor）闲着。请算出每一项代价。
# I AM NOT DONE


def accumulators_per_thread(tile_m: int, tile_n: int, warps: int) -> float:
    """
    [en
    float32 registers that one thread needs for its part of the tile of C; a warp has 32 threads.
    en]
    [zh
    一个线程为 C 的块中自己的那部分所需的 float32 寄存器数；一个线程束（warp）有 32 个线程。
    zh]
    """
    # [solution
    return tile_m * tile_n / (32 * warps)
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]


def shared_bytes(tile_m: int, tile_n: int, tile_k: int, stages: int, size: int) -> int:
    """
    [en
    Shared memory of a program that has `stages` steps along k in flight, elements of `size` bytes.
    en]
    [zh
    沿 k 有 `stages` 步在途的一个实例所需的共享内存，元素 `size` 字节。
    zh]
    """
    # [solution
    return stages * (tile_m + tile_n) * tile_k * size
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def useful_share(m: int, n: int, tile_m: int, tile_n: int) -> float:
    """
    [en
    The part of the computed elements that lies inside C [m, n]; the rest is padding that is masked away.
    en]
    [zh
    算出的元素中位于 C [m, n] 之内的比例；其余是被掩码去掉的填充。
    zh]
    """
    # [solution
    padded_m, padded_n = -(-m // tile_m) * tile_m, -(-n // tile_n) * tile_n
    return m * n / (padded_m * padded_n)
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]


def wave_share(m: int, n: int, tile_m: int, tile_n: int, multiprocessors: int) -> float:
    """
    [en
    Busy multiprocessors, averaged over all waves: each multiprocessor makes one tile at a time, all in equal time.
    en]
    [zh
    所有波平均下来忙碌的流多处理器的比例：每个流多处理器一次做一块，每块用时相同。
    zh]
    """
    # [solution
    tiles = -(-m // tile_m) * -(-n // tile_n)
    waves = -(-tiles // multiprocessors)
    return tiles / (waves * multiprocessors)
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]
