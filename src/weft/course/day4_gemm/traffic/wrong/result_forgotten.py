# rejected at: predict
# C is written, too.
def flops(m: int, n: int, k: int) -> int:
    """
    Multiplications and additions, counted one each.
    """
    return 2 * m * n * k


def bytes_at_least(m: int, n: int, k: int, size: int) -> int:
    """
    Each element of A and B read once, each of C written once.
    """
    return (m * k + k * n) * size


def bytes_tiled(m: int, n: int, k: int, size: int, tile_m: int, tile_n: int) -> int:
    """
    A program makes a tile of C [tile_m, tile_n]: it reads its tile_m rows of A and its tile_n columns of B.

    Nothing is shared between programs. m is a multiple of tile_m, n of tile_n. C is written once.
    """
    a = m * k * (n // tile_n)  # all of A, once for each column of tiles
    b = k * n * (m // tile_m)  # all of B, once for each row of tiles
    return (a + b + m * n) * size


def bound(flop: int, moved: int, flop_per_s: float, bytes_per_s: float) -> str:
    """
    The bound: "compute" where arithmetic takes longer than moving the bytes, else "memory".
    """
    return "compute" if flop / flop_per_s > moved / bytes_per_s else "memory"


def limit_us(flop: int, moved: int, flop_per_s: float, bytes_per_s: float) -> float:
    """
    No kernel is faster than this, in microseconds. Arithmetic and transfers overlap.
    """
    return max(flop / flop_per_s, moved / bytes_per_s) * 1e6
