"""The plan of ``sparse_hopper.cu``: 2:4 semi-structured times dense matrices on Hopper's sparse tensor cores (sm_90 and no
other).

Shapes: A [M, K] by its values [M, K / 2] and metadata [M, K / 16], as ``Sparse24`` has them; B [K, N]; C [M, N].
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import DTYPE_NAMES, Config, Configurations, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.hopper.gemm import SIXTEEN_BITS, Shape, across
from weft.operators.hopper.tensor_maps import Maps, map_why_not
from weft.operators.hopper.tile_sizes import BARRIERS, GROUPS, LINE, MULTIPROCESSORS, SHARED
from weft.operators.launch import multiprocessors, target_sm

SOURCE = Path(__file__).parent / "sparse_hopper.cu"
PIECE, DEPTH = 128, 64  # columns of A whose values fill a line; terms of a stage
ATOM = 64 * LINE  # bytes of 64 x 64 elements


def shared_bytes(c: Config) -> int:
    """Stages of B; lines of A, more than half as many; what is staged of C; the barriers."""
    lines = (c["STAGES"] + 2) // 2
    held = c["WARPGROUPS"] * c["HELD"] * ATOM
    return (c["STAGES"] * c["COLUMNS"] + lines * 64 * c["WARPGROUPS"]) * LINE + held + BARRIERS


def forms() -> Iterator[Config]:
    """Every tile with every cluster, with as many stages as fit; a sum of 64 x 256 leaves a third warpgroup no registers."""
    sizes = {"WARPGROUPS": (2, 3, 1), "COLUMNS": (256, 192, 128, 64), "CLUSTER": (2, 1), "HELD": (2, 1)}
    for c in grid_of(sizes):
        slabs = c["COLUMNS"] // 64
        if slabs % c["HELD"] or (c["WARPGROUPS"] == 3 and slabs > 3):
            continue
        fit = [s for s in range(2, 13) if shared_bytes({**c, "STAGES": s}) <= SHARED]
        yield {**c, "STAGES": fit[-1]}


FROM_L2 = 40  # bytes a cycle and multiprocessor that L2 is assumed to deliver under load
FROM_SHARED = 128  # bytes a cycle of a multiprocessor's shared memory, to read and to write


def piece_cycles(c: Config) -> float:
    """Of 128 columns of A: what is longest of the products, of shared memory (docs/notes/sparse.md) and of L2."""
    groups, columns = c["WARPGROUPS"], c["COLUMNS"]
    of_a, of_b = groups * 64 * LINE, columns * 2 * LINE
    moved = 2 * of_a + (1 + groups) * of_b  # written once; each warpgroup reads its rows of A, and all of B
    return max(2 * groups * columns, moved / FROM_SHARED, (of_a + of_b / c["CLUSTER"]) / FROM_L2)


def ends(c: Config, m: int, n: int, k: int) -> float:
    """When the last tile ends, in cycles; a tile's way out is another piece."""
    tiles = -(-m // (64 * c["WARPGROUPS"] * c["CLUSTER"])) * -(-n // c["COLUMNS"])
    return -(-tiles // (MULTIPROCESSORS // c["CLUSTER"])) * (k // PIECE + 1) * piece_cycles(c)


def heuristic(sm: int, dtype: str, layout: str, m: int, n: int, k: int) -> Config:
    """What ends first by this count."""
    best: Config = min(forms(), key=lambda c: ends(c, m, n, k))
    return {**best, "GROUP": 16}


def candidates(sm: int, dtype: str, layout: str, m: int, n: int, k: int) -> Iterable[Config]:
    best = min(ends(c, m, n, k) for c in forms())
    for c in forms():
        if ends(c, m, n, k) < 1.5 * best:
            yield from ({**c, "GROUP": group} for group in GROUPS)


configuration = Configurations(__file__, "sparse_hopper", heuristic, candidates)


def why_not(values: Tensor, metadata: Tensor, b: Tensor, device: torch.device | None = None) -> str:
    """Why the kernel does not take a matrix of such values and metadata, and b (an empty string when it does)."""
    if (sm := target_sm(device or b.device)) != 90:
        return f"sm_{sm}; the sparse wgmma is of sm_90"
    if b.dtype not in SIXTEEN_BITS or values.dtype != b.dtype:
        return f"dtypes {values.dtype} and {b.dtype}; it takes two of bfloat16 or two of float16"
    k, n = b.shape
    if k % PIECE or not k:
        return f"{k} columns of a; it takes multiples of {PIECE}, whose metadata are read 8 bytes at a time"
    if n % 8:
        return f"rows of {n} elements in the result do not begin on 16 bytes, which TMA wants"
    if not pointer_aligned(metadata):
        return "'a.metadata' does not begin on 16 bytes"
    return map_why_not("a.values", values, 2, False) or map_why_not("b", b, 2, not across(b, -2))


class SparseHopperPlan:
    """The launch of C = A·B into a row-major C; call it with ``(values, metadata, b, c)``. Declines as ``why_not`` says.
    ``device``: where it is launched, if b is not there."""

    def __init__(self, values: Tensor, metadata: Tensor, b: Tensor, device: torch.device | None = None):
        device = device or b.device
        if reason := why_not(values, metadata, b, device):
            raise Declined(reason)
        m, (k, n), b_across = len(values), b.shape, across(b, -2)
        c = configuration(device, DTYPE_NAMES[b.dtype], "N" if b_across else "T", m, n, k)
        groups, columns, cluster = c["WARPGROUPS"], c["COLUMNS"], c["CLUSTER"]
        # two blocks cannot share three boxes of 64 columns, or one: each fetches half of their terms
        deep = DEPTH // cluster if columns // cluster % 64 else DEPTH
        self.maps = (
            Maps(values, False, (64, 64 * groups)),
            Maps(b, not b_across, (64, deep) if b_across else (DEPTH, columns // cluster)),
            Maps(torch.empty((m, n), dtype=b.dtype, device="meta"), False, (64, 64)),
        )
        tiles = -(-m // (64 * groups * cluster)) * -(-n // columns)
        grid = min(multiprocessors(device) // cluster, tiles) * cluster
        sizes = f"{groups}, {columns}, {c['STAGES']}, {cluster}, {c['HELD']}"
        kernel = f"sparse_hopper<{CTYPES[b.dtype]}, {sizes}, {str(b_across).lower()}>"
        self.launch = CudaPlan(SOURCE, kernel, (grid, 1), 128 + 128 * groups, (), cluster, shared_bytes(c))
        self.shape = Shape(m, n, k, 1, c["GROUP"])

    def __call__(self, values: Tensor, metadata: Tensor, b: Tensor, c: Tensor) -> None:
        launch = self.launch.at(self.scalars, values, b, c) if c.is_cuda and c.numel() else self.launch
        launch(metadata)

    def scalars(self, values: Tensor, b: Tensor, c: Tensor) -> tuple[object, ...]:
        """What the kernel is given after the metadata: three tensor maps and the sizes."""
        return (*(of(t) for of, t in zip(self.maps, (values, b, c), strict=True)), self.shape)
