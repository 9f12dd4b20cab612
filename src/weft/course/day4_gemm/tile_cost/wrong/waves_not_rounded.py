# rejected at: predict
# A started wave takes as long as a full one.
def accumulators_per_thread(tile_m: int, tile_n: int, warps: int) -> float:
    """
    float32 registers that one thread needs for its part of the tile of C; a warp has 32 threads.
    """
    return tile_m * tile_n / (32 * warps)


def shared_bytes(tile_m: int, tile_n: int, tile_k: int, stages: int, size: int) -> int:
    """
    Shared memory of a program that has `stages` steps along k in flight, elements of `size` bytes.
    """
    return stages * (tile_m + tile_n) * tile_k * size


def useful_share(m: int, n: int, tile_m: int, tile_n: int) -> float:
    """
    The part of the computed elements that lies inside C [m, n]; the rest is padding that is masked away.
    """
    padded_m, padded_n = -(-m // tile_m) * tile_m, -(-n // tile_n) * tile_n
    return m * n / (padded_m * padded_n)


def wave_share(m: int, n: int, tile_m: int, tile_n: int, multiprocessors: int) -> float:
    """
    Busy multiprocessors, averaged over all waves: each multiprocessor makes one tile at a time, all in equal time.
    """
    tiles = -(-m // tile_m) * -(-n // tile_n)
    waves = tiles / multiprocessors
    return tiles / (waves * multiprocessors)
