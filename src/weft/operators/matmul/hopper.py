"""The plan of ``hopper.cu``: products on Hopper's tensor cores by wgmma, fed by TMA (sm_90 and no other).

It is no implementation of ``matmul`` yet: it has been compiled for sm_90a, and has not run on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plans, multiprocessors
from weft.operators.matmul.tensor_maps import Maps
from weft.operators.matmul.tensor_maps import why_not as map_why_not

SOURCE = Path(__file__).parent / "hopper.cu"
ROWS, LINE, THREADS = 128, 128, 384  # of a tile, bytes of a stage's row, of a block: as in hopper.cu
SHARED = 232448 - 2048  # bytes of a block's shared memory, less barriers and alignment
DTYPES = (torch.bfloat16, torch.float16)


class Shape(ctypes.Structure):
    """``Shape`` of hopper.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("m", "n", "k", "matrices", "group"))


def shared_bytes(config: Config, itemsize: int) -> int:
    """The ring, and what is held of C at a time: two slabs of 64 rows of 128 bytes for each consumer."""
    slabs = min(2, config["COLUMNS"] * itemsize // LINE)
    return config["STAGES"] * (ROWS + config["COLUMNS"]) * LINE + 2 * slabs * 64 * LINE


def heuristic(sm: int, dtype: torch.dtype, layout: str, m: int, n: int, k: int) -> Config:
    """The widest tile of which there are enough for all multiprocessors, and as many stages as fit."""
    wide = -(-m // ROWS) * -(-n // 256) >= 128
    return {"COLUMNS": 256 if wide else 128, "STAGES": 4 if wide else 6, "CLUSTER": 2 if m > ROWS else 1, "GROUP": 8}


def candidates(sm: int, dtype: torch.dtype, layout: str, m: int, n: int, k: int) -> Iterable[Config]:
    sizes = {"COLUMNS": (64, 128, 256), "STAGES": (3, 4, 5, 6, 8), "CLUSTER": (1, 2), "GROUP": (4, 8, 16)}
    for c in grid_of(sizes):
        used = shared_bytes(c, dtype.itemsize)
        if c["COLUMNS"] // c["CLUSTER"] < 64:
            continue  # a block of a cluster fetches whole boxes of 64 columns
        if used <= SHARED and used + (ROWS + c["COLUMNS"]) * LINE > SHARED - 32 * 1024:
            yield c


configuration = Configurations(__file__, "hopper", heuristic, candidates)


def across(t: Tensor, k: int) -> bool:
    """Whether dimension k of a matrix is not its contiguous one."""
    return t.stride(k) != 1 and t.stride(1 - k) == 1


def why_not(a: Tensor, b: Tensor) -> str:
    """Why the kernel does not take a [M, K] and b [K, N] (an empty string when it does)."""
    if a.dtype not in DTYPES:
        return f"dtype {a.dtype}; it takes bfloat16 and float16"
    if reason := map_why_not("a", a, a.element_size(), across(a, 1)):
        return reason
    if reason := map_why_not("b", b, b.element_size(), not across(b, 0)):
        return reason
    if b.shape[1] * b.element_size() % 16:
        return f"rows of {b.shape[1]} elements in the result do not begin on 16 bytes, which TMA wants"
    return ""


class HopperPlan:
    """The launch of C = A·B into a new row-major C [M, N]; call with (a, b, c)."""

    def __init__(self, a: Tensor, b: Tensor):
        if reason := why_not(a, b):
            raise Declined(reason)
        (m, k), n = a.shape, b.shape[1]
        a_across, b_across = across(a, 1), across(b, 0)
        layout = ("T" if a_across else "N") + ("N" if b_across else "T")
        c = configuration(a.device, a.dtype, layout, bucket(m), bucket(n), bucket(k))
        columns, cluster, depth = c["COLUMNS"], c["CLUSTER"], LINE // a.element_size()
        out = torch.empty((m, n), dtype=a.dtype, device="meta")
        self.maps = (
            Maps(a, a_across, (64, depth) if a_across else (depth, ROWS)),
            Maps(b, not b_across, (64, depth) if b_across else (depth, columns // cluster)),
            Maps(out, False, (LINE // out.element_size(), 64)),
        )
        flags = ", ".join(str(f).lower() for f in (a_across, b_across, False, False))
        types = f"{CTYPES[a.dtype]}, {CTYPES[a.dtype]}"
        kernel = f"matmul_hopper<{types}, {columns}, {c['STAGES']}, {cluster}, {flags}, NONE>"
        tiles = -(-m // (ROWS * cluster)) * -(-n // columns)
        grid = min(tiles, multiprocessors(a.device) // cluster) * cluster
        shared = shared_bytes(c, out.element_size())
        scalars = (Shape(m, n, k, 1, c["GROUP"]), ctypes.c_int(1), ctypes.c_int(1))
        self.launch = CudaPlan(SOURCE, kernel, (grid, 1), THREADS, scalars, cluster, shared)
        self.known: dict[tuple[int, int, int], CudaPlan] = {}

    def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        launch = self.launch
        if c.is_cuda:
            key = (a.data_ptr(), b.data_ptr(), c.data_ptr())
            if (found := self.known.get(key)) is None:
                if len(self.known) >= 256:
                    self.known.clear()
                maps = tuple(of(t) for of, t in zip(self.maps, (a, b, c), strict=True))
                found = self.known[key] = dataclasses.replace(launch, scalars=(*maps, *launch.scalars))
            launch = found
        launch(c, c, c)  # in place of scales and bias, which this product has not


plans = Plans(HopperPlan)
