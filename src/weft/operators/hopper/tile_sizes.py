"""Which tile Hopper's main loop takes: what fits, a model of what a launch costs, what is worth measuring."""

import math
from collections.abc import Iterable

from weft.operators.configs import Config, Configurations, grid_of

ROWS, LINE, THREADS = 128, 128, 384  # of a tile, bytes of a stage's row, of a block: as in gemm.cu
SHARED = 232448  # bytes of a block's shared memory
BARRIERS = 256  # bytes: two barriers for each of up to 16 stages


def pitch(width: int) -> int:
    """Bytes of a row of C's slabs in a tile whose row has ``width`` bytes."""
    return LINE // 2 if width % LINE else LINE


def shared_bytes(config: Config, itemsize: int, gated: bool = False, symmetric: bool = False) -> int:
    """The ring; what is held of C (``itemsize``: bytes of an element) at a time, two slabs of 64 rows of 128 bytes for each
    consumer (one, where a tile has an odd number of them); the barriers. ``gated``: two columns of products make one of C;
    ``symmetric``: a slab is held with its mirror image."""
    if symmetric:
        return config["STAGES"] * (ROWS + config["COLUMNS"]) * LINE + 4 * 64 * LINE + BARRIERS
    width = config["COLUMNS"] // (2 if gated else 1) * itemsize
    slabs = 1 if width // pitch(width) % 2 else 2
    return config["STAGES"] * (ROWS + config["COLUMNS"]) * LINE + 2 * slabs * 64 * LINE + BARRIERS


MULTIPROCESSORS = 132
COLUMN_COST = {256: 1.0, 192: 1.02, 160: 1.03, 128: 1.03, 64: 1.2}  # a narrow tile fetches more for as many products
GROUPS = (4, 8, 16)
LEAST_SHARE = 8  # stages of K: a cluster's share of streamed tiles is no shorter
# bytes a cycle that a block writes or reads of sums, assumed: half of the most that L2 gives a multiprocessor
HANDED_OVER = 32
MEETING = 3000  # cycles: of a flag through L2, and the latency of the first reads
GAIN = 1.03  # what streaming must promise to be chosen
REQUEST = 2.5  # cycles: of a line that a block asks L2 for, fitted where rows of 128 bytes lie in two lines


def stages_that_fit(columns: int, itemsize: int, gated: bool = False, symmetric: bool = False) -> int:
    rest = shared_bytes({"COLUMNS": columns, "STAGES": 0}, itemsize, gated, symmetric)
    return min(8, (SHARED - rest) // ((ROWS + columns) * LINE))


def widths(layout: str, itemsize: int = 2, halves: bool = False) -> tuple[int, ...]:
    """The columns of tiles; a gate's half of 192 columns would be one slab of C and a half. Slabs of 8 bits have 128.
    ``halves``: a tile's row may be a whole number of half slabs only, or B's columns of half boxes: 160."""
    gated = layout.endswith("G")
    halves = halves and not gated and itemsize > 1 and layout[1] == "T"
    whole = (c for c in COLUMN_COST if itemsize > 1 or c // (2 if gated else 1) % LINE == 0)
    return tuple(c for c in whole if (c != 192 or not gated) and (c != 160 or halves))


def streamed(tiles: int, stages: int, clusters: int) -> int:
    """How many tiles, of a cluster's rows and so many stages of K, are divided among all clusters by stages: a wave and what is
    left over, or all if they are fewer; 0 where whole waves leave nothing over, or there is too little to divide."""
    count = tiles if tiles < clusters else tiles % clusters and clusters + tiles % clusters
    shares = min(clusters, count * stages // LEAST_SHARE)
    return count if min(tiles, clusters - 1) < shares and count * stages < 2**31 else 0


def lines(row: int) -> float:
    """Lines of 128 bytes that 128 bytes of a row lie in, in the mean of rows that are ``row`` bytes apart."""
    return 2 - math.gcd(row, LINE) / LINE


def heuristic(
    sm: int, dtype: str, layout: str, two_levels: bool, itemsize: int, m: int, n: int, k: int, matrices: int
) -> Config:
    """The tile that a model of the tensor cores' cycles predicts to end first; as many stages as fit.

    A stage is 4 cycles a column, or what its lines take where rows do not begin on lines; a tile's epilogue counts as another.
    Each multiprocessor takes tile after tile, or tiles are streamed: then all end together, but blocks exchange sums.
    """
    size = {"16-bit": 2, "fp32": 4}.get(dtype, 1)
    gated, stages = layout.endswith("G"), -(-k // (LINE // size))
    of_a, of_b = lines((k if layout[0] == "N" else m) * size), lines((n if layout[1] == "N" else k) * size)
    split = max(of_a, of_b) > 1  # then L2 is short, and sums that are exchanged cost more than part of a wave
    ends: dict[tuple[int, int], float] = {}
    for columns in widths(layout, itemsize, not two_levels):
        if gated and columns == 64:
            continue  # half of it would be no slab of C
        cluster = 2 if m > ROWS and columns > 64 else 1
        stage = 4 * columns * COLUMN_COST[columns]
        if split:
            stage = max(stage, REQUEST * (ROWS * of_a + columns // cluster * of_b))
        tiles = -(-m // (ROWS * cluster)) * -(-n // (columns // 2 if gated else columns)) * matrices
        clusters = MULTIPROCESSORS // cluster
        ends[columns, 0] = -(-tiles // clusters) * (stages + 1) * stage
        if (s := streamed(tiles, stages, clusters)) and not (split and tiles >= clusters):
            clusters = min(clusters, s * stages // LEAST_SHARE)
            parts = -(-clusters // s) - (1 if s < clusters and clusters % s == 0 else 0)
            handed = (1 + parts) * (ROWS * columns * 4 / HANDED_OVER + MEETING)
            ends[columns, 1] = GAIN * (tiles * (stages + 1) / clusters * stage + handed)
    columns, stream = min(ends, key=ends.__getitem__)
    cluster = 2 if m > ROWS and columns > 64 else 1
    tile = {"COLUMNS": columns, "STAGES": stages_that_fit(columns, itemsize, gated), "CLUSTER": cluster}
    return {**tile, "GROUP": 16, "STREAM": stream}


def candidates(
    sm: int, dtype: str, layout: str, two_levels: bool, itemsize: int, m: int, n: int, k: int, matrices: int
) -> Iterable[Config]:
    tiles = {"COLUMNS": widths(layout, itemsize, not two_levels), "STAGES": (3, 4, 5, 6, 7, 8), "CLUSTER": (1, 2)}
    gated = layout.endswith("G")
    for c in grid_of({**tiles, "GROUP": GROUPS, "STREAM": (0, 1)}):
        used = shared_bytes(c, itemsize, gated)
        if c["COLUMNS"] // max(c["CLUSTER"], 2 if gated else 1) < 64:
            continue  # boxes of B have at least 64 columns, and so have slabs of C
        count = -(-m // (ROWS * c["CLUSTER"])) * -(-n // (c["COLUMNS"] // 2 if gated else c["COLUMNS"])) * matrices
        stages = -(-k // (LINE // {"16-bit": 2, "fp32": 4}.get(dtype, 1)))
        if c["STREAM"] and not streamed(count, stages, MULTIPROCESSORS // c["CLUSTER"]):
            continue
        if used <= SHARED and used + (ROWS + c["COLUMNS"]) * LINE > SHARED - 34 * 1024:
            yield c


configuration = Configurations(__file__, "hopper", heuristic, candidates)


def triangle(m: int, columns: int, cluster: int) -> int:
    """Tiles that touch the lower triangle of an [m, m] matrix: as many as clusters compute."""
    height, most = ROWS * cluster, -(-m // columns)
    return sum(min(most, -(-(row + 1) * height // columns)) for row in range(-(-m // height)))
