# TODO(en): A larger tile moves fewer bytes, and costs: registers for its accumulators, shared memory for the stages in flight,
# padding at the edges, and multiprocessors that idle in the last wave. Work out each cost.
# TODO(zh): 块越大，搬运的字节越少，但有代价：累加器占寄存器，在途的各级（stage）占共享内存，边缘要填充，最后一波（wave）里
# 有流多处理器（multiprocessor）闲着。请算出每一项代价。
# I AM NOT DONE


def accumulators_per_thread(tile_m: int, tile_n: int, warps: int) -> float:
    """float32 registers that one thread needs for its part of the tile of C; a warp has 32 threads."""
    # [solution
    return tile_m * tile_n / (32 * warps)
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]


def shared_bytes(tile_m: int, tile_n: int, tile_k: int, stages: int, size: int) -> int:
    """Shared memory of a program that has `stages` steps along k in flight, elements of `size` bytes."""
    # [solution
    return stages * (tile_m + tile_n) * tile_k * size
    # solution]
    # [skeleton
    #: return 0
    # skeleton]


def useful_share(m: int, n: int, tile_m: int, tile_n: int) -> float:
    """The part of the computed elements that lies inside C [m, n]; the rest is padding that is masked away."""
    # [solution
    padded_m, padded_n = -(-m // tile_m) * tile_m, -(-n // tile_n) * tile_n
    return m * n / (padded_m * padded_n)
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]


def wave_share(m: int, n: int, tile_m: int, tile_n: int, multiprocessors: int) -> float:
    """Busy multiprocessors, averaged over all waves: each multiprocessor makes one tile at a time, all in equal time."""
    # [solution
    tiles = -(-m // tile_m) * -(-n // tile_n)
    waves = -(-tiles // multiprocessors)
    return tiles / (waves * multiprocessors)
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]
