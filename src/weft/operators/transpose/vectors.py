"""The plan of ``transpose.cu``: 16-byte accesses on every side, blocks of 16 x 16 bytes transposed in registers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.transpose.layout import Matrices, matrices_of, one_grid, require, size_class

SOURCE = Path(__file__).parent / "transpose.cu"
SHARED_BYTES = 48 * 1024  # what a kernel may declare without asking for more


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """128 bytes of a row on both sides (256 for 32 bits, so that a block has 256 threads); bands of 4 KiB of rows of y."""
    return {"SHARED": 1, "R": 64, "C": 64, "EACH": 1, "GROUP": 64 // dtype.itemsize, "DIAGONAL": 0}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    k = 16 // dtype.itemsize
    orders = grid_of({"GROUP": (1, 4, 8, 16, 32, 64), "DIAGONAL": (0, 1)})
    orders = [o for o in orders if not o["DIAGONAL"] or o["GROUP"] in (1, 16)]
    for c in grid_of({"R": (8 * k, 16 * k, 32 * k), "C": (8 * k, 16 * k, 32 * k), "EACH": (1, 2)}):
        threads = c["R"] // k * c["C"] // k // c["EACH"]
        if 64 <= threads <= 512 and c["R"] * c["C"] * dtype.itemsize <= SHARED_BYTES:
            yield from ({"SHARED": 1, **c, **order} for order in orders)
    for across in (8, 16, 32):
        yield from ({"SHARED": 0, "R": 8 * k, "C": across * k, "EACH": 1, **order} for order in orders)


configuration = Configurations(__file__, "transpose_vectors", heuristic, candidates)


def why_not(x: Tensor) -> str:
    """Why x cannot be moved 16 bytes at a time on both sides (an empty string when it can)."""
    m = matrices_of(x)
    if m is None:
        return "the leading dimensions do not collapse into two of one stride each, so a copy would be needed"
    k = 16 // x.element_size()
    if m.M % k or m.N % k:
        return f"{m.M} x {m.N}; blocks of 16 bytes on both sides need multiples of {k}"
    if m.col != 1:
        return f"columns {m.col} elements apart; 16-byte accesses need adjacent ones"
    if m.row % k or m.b0 % k or m.b1 % k or not pointer_aligned(x):
        return "rows that do not begin on 16 bytes"
    return ""


def plan(x: Tensor) -> CudaPlan:
    """The launch that writes x.mT, contiguous; raises Declined as :func:`why_not` says."""
    if reason := why_not(x):
        raise Declined(reason)
    m, config = require(x), configuration(x.device, x.dtype, size_class(x))
    r, c = config["R"], config["C"]
    blocks = one_grid(m.batch * -(-m.M // r) * -(-m.N // c))
    k = 16 // x.element_size()
    threads = r // k * c // k // config["EACH"]
    kernel = "transpose_shared" if config["SHARED"] else "transpose_registers"
    kernel = f"{kernel}<{CTYPES[x.dtype]}, {r}, {c}, {config['EACH']}>"
    return CudaPlan(SOURCE, kernel, (blocks, 1), threads, scalars(m, config["GROUP"], config["DIAGONAL"]))


def scalars(m: Matrices, group: int, diagonal: int) -> tuple[Any, ...]:
    """What the kernels take after their pointers."""
    sizes = (m.M, m.N, m.B1, m.b0, m.b1, m.row)
    return (*(ctypes.c_longlong(v) for v in sizes), ctypes.c_int(group), ctypes.c_int(diagonal))
