"""The plan of ``staying.cu``: a norm of the longest rows by clusters of blocks that take row after row (sm_90 and later)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch

from weft.definition import Declined
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import target_sm
from weft.operators.normalization.backward import REGISTERS, SYSTEM
from weft.operators.normalization.kind import Given, Kind
from weft.operators.residency import resident, shared_limit
from weft.operators.row_cluster import MAX_CLUSTER

SOURCE = Path(__file__).parent / "staying.cu"
FEWEST = 3  # places of a ring: a row is written, the next one is summed, a third one comes
OWN = 2304  # bytes of a block's shared memory, at most, beside the ring: the system's, barriers, sums


def places(sm: int, c: Config, item: int, added: bool) -> int:
    """Rows that a block's share of shared memory holds a slice of."""
    room = (shared_limit(sm) + SYSTEM) // c["PER_SM"] - OWN
    return min(room // (c["THREADS"] * c["EACH"] * item * (1 + added)), 8)


def registers(c: Config, item: int, vectors: int) -> int:
    """About what a thread needs: weight and bias as they lie in memory, and the rest; more where elements are unpacked."""
    return c["EACH"] * item * vectors // 4 + (32 if item == 4 else 48)


def candidates(sm: int, dtype: torch.dtype, n: int, centered: bool, added: bool) -> Iterable[Config]:
    """Nothing (``cluster.cu``), or slices of 8 to 64 elements a thread by 1, 2 or 4 blocks a multiprocessor."""
    yield {}
    item = dtype.itemsize
    choices = {"THREADS": (256, 512, 1024), "EACH": (8, 16, 32, 64), "PER_SM": (1, 2, 4)}
    for c in grid_of(choices):
        threads, blocks = c["THREADS"] * c["PER_SM"], bucket(-(-n // (c["THREADS"] * c["EACH"])))
        lean = registers(c, item, 1 + centered) * threads <= REGISTERS
        enough = threads == 256 if c["EACH"] == 64 else 512 <= threads <= 1024
        if lean and enough and 2 <= blocks <= MAX_CLUSTER and places(sm, c, item, added) >= FEWEST:
            yield c


configuration = Configurations(__file__, "staying", lambda sm, *key: {}, candidates)


def plan(given: Given, eps: float, kind: Kind, kept: bool) -> CudaPlan | None:
    """The launch, or None where ``cluster.cu`` is configured or rows are not whole slices; what that takes is taken."""
    x, weight = given.x, given.weight
    m, n, x_row, _ = rows_of(x) or (0, 0, 0, 0)
    config = configuration(x.device, x.dtype, bucket(n), kind.centered, kind.added)
    if not config:
        return None
    threads, each, per_sm = config["THREADS"], config["EACH"], config["PER_SM"]
    ring = places(target_sm(x.device), config, x.element_size(), kind.added)
    cluster, rest = divmod(n, threads * each)
    if ring < FEWEST or rest or not 2 <= cluster <= MAX_CLUSTER:
        return None
    flags = ", ".join(str(f).lower() for f in (kind.centered, kind.weighted, kind.biased, kind.added, kept))
    kernel = f"norm_staying<{CTYPES[x.dtype]}, {CTYPES[weight.dtype]}, {threads}, {each}, {ring}, {per_sm}, {flags}>"
    r_row, y_row = ((rows_of(t) or (0, 0, 0))[2] for t in (given.residual, torch.empty_like(x, device="meta")))
    scalars = (*(ctypes.c_longlong(v) for v in (m, n, x_row, r_row, y_row, y_row)), ctypes.c_float(eps))
    shared = ring * (1 + kind.added) * threads * each * x.element_size()
    one = CudaPlan(SOURCE, kernel, (cluster, 1), threads, scalars, cluster, shared)
    with contextlib.suppress(Declined):  # no cluster of so many blocks fits on this device
        return dataclasses.replace(one, grid=(min(m, resident(one, x.device)) * cluster, 1))
    return None
