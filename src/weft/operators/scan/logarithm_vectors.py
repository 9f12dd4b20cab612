"""The configurations of ``scan.cu`` for logarithms of sums of exponentials.

A thread keeps its exponentials, of 32 bits each: of 16-bit elements half as many as of a sum's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weft.operators.configs import Config, grid_of
from weft.operators.scan.vectors import LONGEST, MAX_CLUSTER, rings, warps_of

BYTES = 64  # of a row, that a thread can hold whatever the dtype
# TEAMS, WARPS, VECTORS, ADDERS, PER_SM, as vectors.RINGS; adders take exponentials, so there are more of them.
RINGS = ((2, 8, 4, 8, 1), (3, 8, 4, 4, 1), (1, 16, 4, 4, 1))
WIDE = ((2, 8, 8, 4, 1), *RINGS)  # of float32, which is its own exponential's room


def rings_of(sm: int, dtype: torch.dtype, loads: int) -> Iterable[Config]:
    return rings(sm, loads, WIDE if dtype == torch.float32 else RINGS)


def held(dtype: torch.dtype) -> int:
    """Bytes of a row whose exponentials are 32 registers."""
    return 32 * dtype.itemsize


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Rows of up to 512 KiB in registers; longer ones in the first ring that fits, 128 KiB under way."""
    if sm < 90 or (n < LONGEST and n * dtype.itemsize <= 2**19):
        return {"BYTES": held(dtype) if sm >= 90 else BYTES, "THREADS": 128 if n * dtype.itemsize <= 2**16 else 512}
    return next(iter(rings_of(sm, dtype, 2**17)))


def candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    for c in grid_of({"BYTES": (held(dtype) // 2, held(dtype)), "THREADS": (64, 128, 256, 512)}):
        most = c["THREADS"] * (MAX_CLUSTER if sm >= 90 else 1)
        if n < LONGEST and 32 * warps_of(n * dtype.itemsize, c["BYTES"]) <= most:
            yield c
    if sm >= 90:
        for c in rings_of(sm, dtype, 2**17):
            if c["WARPS"] * c["VECTORS"] * 512 <= n * dtype.itemsize:
                yield c
