"""The plan of ``windows.cu``: rows that begin anywhere, read by words of 4 bytes and written by whole sectors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plans
from weft.operators.transpose import vectors
from weft.operators.transpose.layout import matrices_of, one_grid, require, size_class

SOURCE = Path(__file__).parent / "windows.cu"
SECTOR_BYTES = 32
SHARED_BYTES = 48 * 1024  # of a tile at most, so that a multiprocessor holds several


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """256 bytes of each row of x, 128 elements of each row of y: what a block reads beyond its tile (a sector's worth of rows,
    a sector of each row) is then a quarter of it or less. Bands as high as are best for :mod:`vectors` in large matrices."""
    return {"R": 128, "C": 256 // dtype.itemsize, "THREADS": 256, "GROUP": 64}


def candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    line = 128 // dtype.itemsize
    tiles = {"R": (64, 128, 256), "C": (line, 2 * line, 4 * line), "THREADS": (256, 512)}
    for c in grid_of({**tiles, "GROUP": (1, 8, 32, 64)}):
        across, warps = c["R"] // line, c["THREADS"] // 32  # warps side by side along a row of y, of all
        shares = across and warps % (2 * across) == 0 and c["C"] % (4 * warps // across) == 0
        if shares and shared_bytes(c, c["C"] + 5, dtype) <= SHARED_BYTES:
            yield c


configuration = Configurations(__file__, "transpose_windows", heuristic, candidates)


def why_not(x: Tensor) -> str:
    """Why x cannot be read by words (an empty string when it can)."""
    m = matrices_of(x)
    if m is None:
        return "the leading dimensions do not collapse into two of one stride each, so a copy would be needed"
    if m.col != 1:
        return f"columns {m.col} elements apart; words of 4 bytes need adjacent ones"
    return ""


def pitch_and_step(dtype: torch.dtype, c: int, m: int, x_row: int) -> tuple[int, int]:
    """How many elements rows of the tile are apart in shared memory, and how many columns the four rows of y are apart that
    a warp writes together.

    Lane (v, j) reads row r(j) + v K of column j STEP. Windows of neighbouring columns begin M elements apart, so r(j) falls by
    M STEP j but for whole vectors, and the lane's address is v K PITCH + j STEP (1 - M PITCH) but for K PITCH times whole
    numbers. The 8 v are 4 words times an odd number apart, or 8 words where PITCH must be even (two lanes to a bank then):
    all multiples of 4 words. So the four j must be different modulo 4 words.
    """
    if dtype == torch.float32:  # PITCH and M odd: two lanes to a bank, if M PITCH is 3 modulo 4
        wanted, step = {3 * m % 4} if m % 2 else {1, 3}, 1
    else:  # STEP (1 - M PITCH) is to be 2 modulo 4: two elements to a word
        c += 2
        if x_row % 2 == 0:
            wanted, step = {2}, 2
        elif m % 2:
            wanted, step = {3 * m % 4}, 1
        else:
            wanted, step = {1, 3}, 2
    return next(p for p in range(c, c + 4) if p % 4 in wanted), step


def shared_bytes(config: Config, pitch: int, dtype: torch.dtype) -> int:
    rows = config["R"] + SECTOR_BYTES // dtype.itemsize - 1
    return -(-(rows * pitch + 2) * dtype.itemsize // 16) * 16


def plan(x: Tensor) -> CudaPlan:
    """The launch that writes x.mT, contiguous; raises Declined as :func:`why_not` says."""
    if reason := why_not(x):
        raise Declined(reason)
    m, config = require(x), configuration(x.device, x.dtype, size_class(x))
    r, c, threads = config["R"], config["C"], config["THREADS"]
    tiles_m, tiles_n = -(-(m.M + SECTOR_BYTES // x.element_size() - 1) // r), -(-m.N // c)
    bands = -(-tiles_m // config["GROUP"])
    group = -(-tiles_m // bands)  # of equal height: a last one of few rows would have nothing to share
    blocks = one_grid(m.batch * bands * group * tiles_n)
    pitch, step = pitch_and_step(x.dtype, c, m.M, m.row)
    kernel = f"transpose_windows<{CTYPES[x.dtype]}, {r}, {c}, {pitch}, {step}, {threads}>"
    sizes = (m.M, m.N, m.B1, m.b0, m.b1, m.row)
    scalars = (*(ctypes.c_longlong(v) for v in sizes), *(ctypes.c_uint(v) for v in (tiles_n, group, bands)))
    return CudaPlan(SOURCE, kernel, (blocks, 1), threads, scalars, shared_bytes=shared_bytes(config, pitch, x.dtype))


# Every matrix of adjacent columns: by vectors where both sides begin on 16 bytes, else by windows.
plans = Plans(lambda x: plan(x) if vectors.why_not(x) else vectors.plan(x))
