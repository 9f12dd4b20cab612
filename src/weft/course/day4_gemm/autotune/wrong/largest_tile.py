# rejected at: right
# Largest first: right for large matrices, wrong where waves are few.
Config = tuple[int, int, int, int, int]


def fits(config: Config, machine: dict[str, float]) -> bool:
    """
    Shared memory within machine["shared_bytes"], accumulators of a thread within machine["accumulators"].
    """
    tile_m, tile_n, tile_k, stages, warps = config
    shared = stages * (tile_m + tile_n) * tile_k * 2
    return shared <= machine["shared_bytes"] and tile_m * tile_n / (32 * warps) <= machine["accumulators"]


def predicted_us(config: Config, m: int, n: int, k: int, machine: dict[str, float]) -> float:
    """
    The larger of two times, in microseconds.

    Arithmetic: waves of tiles, padding and idle multiprocessors included; one multiprocessor has
    machine["flop_per_s"] / machine["multiprocessors"] and makes one tile at a time.
    Traffic: the padded tiles of A and B that all programs load, through L2 at machine["l2_bytes_per_s"].
    """
    tile_m, tile_n, tile_k, _, _ = config
    tiles = -(-m // tile_m) * -(-n // tile_n)
    padded_k = -(-k // tile_k) * tile_k
    waves = -(-tiles // machine["multiprocessors"])
    arithmetic = waves * 2 * tile_m * tile_n * padded_k / (machine["flop_per_s"] / machine["multiprocessors"])
    traffic = tiles * (tile_m + tile_n) * padded_k * 2 / machine["l2_bytes_per_s"]
    return max(arithmetic, traffic) * 1e6


def worth_measuring(configs: list[Config], m: int, n: int, k: int, machine: dict[str, float], top: int) -> list[Config]:
    candidates = [c for c in configs if fits(c, machine)]
    return sorted(candidates, key=lambda c: -c[0] * c[1])[:top]
