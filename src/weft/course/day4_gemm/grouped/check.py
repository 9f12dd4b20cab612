TOGETHER = 16  # programs that run at the same time


def check(learner, t):
    for tiles_m, tiles_n, group in ((8, 8, 4), (t.integers(3, 8), t.integers(5, 12), 4), (7, 9, 3), (2, 11, 4)):
        grid = f"tile_of(pid, {tiles_m}, {tiles_n}, {group})"
        made = [learner.tile_of(pid, tiles_m, tiles_n, group) for pid in range(tiles_m * tiles_n)]
        every = [(i, j) for i in range(tiles_m) for j in range(tiles_n)]
        for pid, tile in enumerate(made):
            t.require(
                tile in every,
                f"{grid}: program {pid} gets the tile {tile}, which C does not have",
                f"{grid}：实例 {pid} 得到的块 {tile} 不在 C 里",
            )
            t.require(
                tile not in made[:pid],
                f"{grid}: programs {made.index(tile)} and {pid} both get the tile {tile}, so another is left out",
                f"{grid}：实例 {made.index(tile)} 和 {pid} 都得到块 {tile}，于是漏掉了另一块",
            )
    tiles_m = tiles_n = 16
    made = [learner.tile_of(pid, tiles_m, tiles_n, 4) for pid in range(tiles_m * tiles_n)]
    panels = (
        0  # rows of tiles of A and columns of tiles of B, fetched from memory once for all programs that run together
    )
    for first in range(0, len(made), TOGETHER):
        wave = made[first : first + TOGETHER]
        panels += len({i for i, _ in wave}) + len({j for _, j in wave})
    t.at_most(
        panels,
        len(made) // TOGETHER * (4 + TOGETHER // 4),
        f"panels of A and B fetched for 16 x 16 tiles, {TOGETHER} programs at a time",
        f"16 x 16 块、每次同时运行 {TOGETHER} 个实例时取来的 A、B 条带数",
    )
