"""The plans of ``scan.cu``: scans along rows of adjacent elements, 16 bytes an access."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.definition import SHARED_LIMIT, Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import multiprocessors, target_sm
from weft.operators.reduction.views import View

if TYPE_CHECKING:
    from weft.operators.scan.plans import Formula

SOURCE = Path(__file__).parent / "scan.cu"
MAX_CLUSTER = 16  # blocks
LONGEST = 2**18  # longer rows are configured alike
SYSTEM = 1024  # bytes of shared memory that the system takes for a block
REGISTERS = 65536
HEAD = 16  # words of state before the first row's, as in scan.cu

# ---- configurations --------------------------------------------------------------------------------------------------
# {"BYTES", "THREADS"}: rows in registers, so many bytes a thread, so many threads a block at least;
# {"TEAMS", "WARPS", "VECTORS", "SLOTS", "LOADS", "ADDERS", "PER_SM"}: rows in tiles, as the kernel's template arguments.

# TEAMS, WARPS, VECTORS, ADDERS, PER_SM: tiles of WARPS * VECTORS * 512 bytes, TEAMS of them in registers.
RINGS = ((2, 8, 8, 4, 1), (3, 8, 8, 2, 1), (3, 8, 7, 2, 1), (3, 8, 6, 2, 1), (2, 4, 8, 2, 2))


def warps_of(n_bytes: int, each: int) -> int:
    """Warps that hold a row at so many bytes a thread."""
    return bucket(-(-n_bytes // (32 * each)))


def warps_of_ring(c: Config) -> int:
    """Warps of a block: one takes tiles, one joins what comes before, others add, scan."""
    return 2 + c["ADDERS"] + c["TEAMS"] * c["WARPS"]


def shared_bytes(c: Config) -> int:
    """Shared memory of a block: slots, what is known of tiles under way, the system's."""
    own = 16 * c["SLOTS"] + (c["SLOTS"] + c["TEAMS"]) * (24 + 4 * c["WARPS"])
    return c["SLOTS"] * c["WARPS"] * c["VECTORS"] * 512 + -(-own // 128) * 128 + SYSTEM


def rings(sm: int, loads: int, shapes: Sequence[tuple[int, ...]] = RINGS) -> Iterable[Config]:
    """Rings of some shapes with as many slots as fit, and copies of so many bytes under way on a multiprocessor (0: of all
    slots)."""
    room = SHARED_LIMIT[max(a for a in SHARED_LIMIT if a <= sm)] + SYSTEM
    for teams, warps, vectors, adders, per_sm in shapes:
        c = {
            "TEAMS": teams,
            "WARPS": warps,
            "VECTORS": vectors,
            "SLOTS": 16,
            "LOADS": 16,
            "ADDERS": adders,
            "PER_SM": per_sm,
        }
        while c["SLOTS"] and shared_bytes(c) * per_sm > room:
            c["SLOTS"] -= 1
        c["LOADS"] = min(loads // (warps * vectors * 512 * per_sm) if loads else 16, c["SLOTS"])
        registers = 24 + 5 * vectors  # of a thread, at least
        if c["SLOTS"] >= teams and 32 * warps_of_ring(c) * registers * per_sm <= REGISTERS:
            yield c


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Rows of up to 512 KiB in registers, 128 bytes a thread; longer ones in the first ring that fits, 128 KiB under way."""
    if sm < 90 or (n < LONGEST and n * dtype.itemsize <= 2**19):
        return {"BYTES": 128, "THREADS": 128 if n * dtype.itemsize <= 2**17 else 512}
    return next(iter(rings(sm, 2**17)))


def candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    for c in grid_of({"BYTES": (64, 128), "THREADS": (64, 128, 256, 512)}):
        most = c["THREADS"] * (MAX_CLUSTER if sm >= 90 else 1)
        if n < LONGEST and 32 * warps_of(n * dtype.itemsize, c["BYTES"]) <= most:
            yield c
    if sm < 90:
        return
    found = list(rings(sm, 2**17))
    if n >= LONGEST:
        found += [*rings(sm, 3 * 2**15), *rings(sm, 0)][: len(found) + 1]
    for c in (c for i, c in enumerate(found) if c not in found[:i]):
        spills = dtype != torch.float32 and c["TEAMS"] * c["VECTORS"] == 24
        if not spills and c["WARPS"] * c["VECTORS"] * 512 <= n * dtype.itemsize:
            yield c


# ---- plans -----------------------------------------------------------------------------------------------------------


def why_not(v: View, y: View, x: Tensor, dtype: torch.dtype, formula: Formula) -> str:
    """Why x cannot be scanned 16 bytes at a time (an empty string when it can).

    Args:
        v, y: x and the result as [M, N, K].
        dtype: of the result.
    """
    count = 16 // x.element_size()
    if dtype != x.dtype:
        return "a result of another dtype than x"
    if v.K != 1 or v.n != 1 or y.n != 1:
        return "elements along 'dim' that do not lie side by side"
    if v.N % count or (v.M > 1 and (v.m % count or y.m % count)) or not pointer_aligned(x):
        return "rows that do not begin and end on 16 bytes"
    if target_sm(x.device) < 90 and v.N * x.element_size() > 1024 * formula.bytes_held:
        return "rows longer than a block's registers hold; tiles need copies that come with sm_90"
    return ""


class VectorsPlan:
    """A scan of rows: call with ``(x, y)``."""

    def __init__(
        self, v: View, y: View, x: Tensor, dtype: torch.dtype, formula: Formula, configured: Configurations, *,
        exclusive: bool, reverse: bool,
    ):  # fmt: skip
        """Raises Declined as :func:`why_not` says."""
        if reason := why_not(v, y, x, dtype, formula):
            raise Declined(reason)
        config = configured(x.device, x.dtype, min(bucket(v.N), LONGEST))
        element = CTYPES[x.dtype]
        kind = f"{element}, {formula.cuda.format(element)}, {str(reverse).lower()}, {str(exclusive).lower()}"
        self.words = 0
        if "BYTES" in config:
            self.launch = _rows(v, y, x, config, kind)
        else:
            self.launch, self.words = _tiles(v, y, x, config, kind)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        if self.words:
            self.launch(x, torch.zeros(self.words, dtype=torch.int64, device=x.device), y)
        else:
            self.launch(x, y)


def _rows(v: View, y: View, x: Tensor, config: Config, kind: str) -> CudaPlan:
    """Whole rows in registers, up to BYTES a thread: several rows by a warp, or one by several warps or a cluster of blocks."""
    vectors, each = v.N * x.element_size() // 16, config["BYTES"] // 16
    lanes = min(bucket(vectors), 32)
    needed = warps_of(v.N * x.element_size(), config["BYTES"])
    threads = config["THREADS"] if target_sm(x.device) >= 90 else max(config["THREADS"], 32 * needed)
    warps = min(needed, threads // 32)
    cluster = needed // warps
    held = -(-vectors // (lanes * needed))
    rows = max(each // held, 1) if cluster == 1 else 1
    blocks = cluster * -(-v.M // (threads // (32 * warps) * rows * (32 // lanes)))
    kernel = f"scan_rows<{kind}, {lanes}, {held}, {rows}, {warps}, {threads}, {cluster}>"
    return CudaPlan(SOURCE, kernel, (one_grid(blocks), 1), threads, longs(v.M, v.N, v.m, y.m), cluster)


def _tiles(v: View, y: View, x: Tensor, config: Config, kind: str) -> tuple[CudaPlan, int]:
    """Rows in tiles, and the words of state that their looking back takes."""
    tile = config["WARPS"] * config["VECTORS"] * 512  # bytes
    tiles = -(-v.N * x.element_size() // tile)
    words = HEAD + v.M * tiles
    blocks = min(multiprocessors(x.device) * config["PER_SM"], one_grid(v.M * tiles))
    keys = ("TEAMS", "WARPS", "VECTORS", "SLOTS", "LOADS", "ADDERS", "PER_SM")
    kernel = f"scan_ring<{kind}, {', '.join(str(config[k]) for k in keys)}>"
    scalars = (*longs(v.N), ctypes.c_uint(tiles), ctypes.c_uint(v.M * tiles), *longs(v.m, y.m))
    slots = config["SLOTS"] * tile
    return CudaPlan(SOURCE, kernel, (blocks, 1), warps_of_ring(config) * 32, scalars, shared_bytes=slots), words


def longs(*values: int) -> tuple[ctypes.c_longlong, ...]:
    return tuple(ctypes.c_longlong(value) for value in values)


def one_grid(blocks: int) -> int:
    if blocks >= 2**31:
        raise Declined(f"{blocks} blocks; a grid has 2**31 - 1")
    return blocks
