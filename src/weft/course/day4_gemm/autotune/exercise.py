# TODO(en): Autotuning measures candidates, so argue first which deserve it. Predict the time of a configuration, leave out those
# that do not fit, and return the `top` fastest, fastest first. That is what prune_configs_by of triton.autotune does.
# A configuration is (tile_m, tile_n, tile_k, stages, warps). The machine is a dict; operands have 2 bytes.
# TODO(zh): 自动调优（autotuning）靠实测候选配置，所以先论证哪些值得测。请预测一个配置的时间，去掉放不下的，返回最快的 `top` 个，
# 最快的在前。triton.autotune 的 prune_configs_by 做的就是这件事。
# 一个配置是 (tile_m, tile_n, tile_k, stages, warps)。machine 是字典；操作数每个 2 字节。
# I AM NOT DONE

Config = tuple[int, int, int, int, int]


def fits(config: Config, machine: dict[str, float]) -> bool:
    """
    [en
    Shared memory within machine["shared_bytes"], accumulators of a thread within machine["accumulators"].
    en]
    [zh
    共享内存不超过 machine["shared_bytes"]，每个线程的累加器不超过 machine["accumulators"]。
    zh]
    """
    tile_m, tile_n, tile_k, stages, warps = config
    # [solution
    shared = stages * (tile_m + tile_n) * tile_k * 2
    return shared <= machine["shared_bytes"] and tile_m * tile_n / (32 * warps) <= machine["accumulators"]
    # solution]
    # [skeleton
    #: return True
    # skeleton]


def predicted_us(config: Config, m: int, n: int, k: int, machine: dict[str, float]) -> float:
    """
    [en
    The larger of two times, in microseconds.

    Arithmetic: waves of tiles, padding and idle multiprocessors included; one multiprocessor has
    machine["flop_per_s"] / machine["multiprocessors"] and makes one tile at a time.
    Traffic: the padded tiles of A and B that all programs load, through L2 at machine["l2_bytes_per_s"].
    en]
    [zh
    两个时间中较长的一个，单位是微秒。

    计算：块分成的波，包括填充和闲置的流多处理器；一个流多处理器的速率是
    machine["flop_per_s"] / machine["multiprocessors"]，一次做一块。
    访存：所有实例经 L2 读取的 A、B 各块（含填充），速率是 machine["l2_bytes_per_s"]。
    zh]
    """
    tile_m, tile_n, tile_k, _, _ = config
    # [solution
    tiles = -(-m // tile_m) * -(-n // tile_n)
    padded_k = -(-k // tile_k) * tile_k
    waves = -(-tiles // machine["multiprocessors"])
    arithmetic = waves * 2 * tile_m * tile_n * padded_k / (machine["flop_per_s"] / machine["multiprocessors"])
    traffic = tiles * (tile_m + tile_n) * padded_k * 2 / machine["l2_bytes_per_s"]
    return max(arithmetic, traffic) * 1e6
    # solution]
    # [skeleton
    #: return 0.0
    # skeleton]


def worth_measuring(configs: list[Config], m: int, n: int, k: int, machine: dict[str, float], top: int) -> list[Config]:
    # [solution
    candidates = [c for c in configs if fits(c, machine)]
    return sorted(candidates, key=lambda c: predicted_us(c, m, n, k, machine))[:top]
    # solution]
    # [skeleton
    #: return configs[:top]
    # skeleton]
