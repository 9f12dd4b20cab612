"""The plan of ``dropped_backward.cu``: the gradient of dropout + residual + RMSNorm in one pass (sm_90 and later)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import partial_sums
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plans, target_sm
from weft.operators.normalization import backward
from weft.operators.residency import resident

SOURCE = Path(__file__).parent / "dropped_backward.cu"
TENSORS = 3  # h, dy and dh are read
GROUP = 8  # elements with one random number
LONGEST = 32768  # columns that forward takes; a third tensor of 131072 would not fit
RANDOM_REGISTERS = 24  # of a thread, about, for random numbers and a second result


def fits(sm: int, c: Config, dtype: torch.dtype) -> bool:
    """Whether registers hold PER_SM such blocks."""
    each = backward.registers(c["EACH"], c["ROWS"], dtype, False) + RANDOM_REGISTERS
    return c["THREADS"] * each * c["PER_SM"] <= backward.REGISTERS


def candidates(sm: int, dtype: torch.dtype, n: int) -> Iterable[Config]:
    """Those of RMSNorm's gradient that hold a third tensor: at least 8 warps a multiprocessor, at most twice the fewest
    blocks a row, and 2 to 4 vectors of a thread in a group, which share what is done once a group."""
    vector = 16 // dtype.itemsize
    found = [c for c in backward.candidates(sm, dtype, n, False, TENSORS) if fits(sm, c, dtype)]
    fewest = min(blocks(c, n) for c in found)
    for c in found:
        shared = 2 * vector <= c["EACH"] * c["ROWS"] <= 4 * vector and blocks(c, n) <= 2 * fewest
        if c["THREADS"] * c["PER_SM"] >= 256 and shared:
            yield c


def blocks(c: Config, n: int) -> int:
    """That share a row."""
    return bucket(-(-n // (c["THREADS"] * c["EACH"])))


def heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """The fewest blocks a row, at most two vectors of it a thread, and of 16-bit floats four of a group, since instructions
    are many there: what the gradients of both norms were measured to want."""
    vector = 16 // dtype.itemsize
    group = 4 * vector if dtype.itemsize == 2 else 2 * vector

    def rank(c: Config) -> tuple[int, ...]:
        wide = max(c["EACH"] - 2 * vector, 0)
        shape = abs(c["EACH"] * c["ROWS"] - group), abs(c["THREADS"] - 256)
        return (blocks(c, n), wide, *shape, -c["STAGES"], -c["PER_SM"])

    return min(candidates(sm, dtype, n), key=rank)


configuration = Configurations(__file__, "dropped_backward", heuristic, candidates)


def why_not(h: Tensor, dy: Tensor, dh: Tensor, weight: Tensor) -> str:
    """Why the kernel does not take these (an empty string when it does)."""
    n = h.shape[-1]
    if n % GROUP or n > LONGEST or not h.is_contiguous():
        return (
            f"h of {n} columns, strides {h.stride()}; it takes contiguous rows of multiples of {GROUP} up to {LONGEST}"
        )
    return backward.why_not(h, dy, weight, False) or backward.unaligned(dh, dh, None)


class DroppedPlan:
    """The launches of the gradient. Call with ``(h, dy, dh, weight, dr, dx, dw, seed_at, seed, offset, last, scale)``: h, dr
    and dx contiguous [M, N], dy and dh rows [M, N], weight and dw [N]; the seed is the element of ``seed_at``, int64, if
    ``seed_in_memory``, else ``seed``; an element is dropped whose 16 random bits, in the upper half of a word, are at most
    ``last``."""

    def __init__(self, h: Tensor, dy: Tensor, dh: Tensor, weight: Tensor, eps: float, seed_in_memory: bool):
        if reason := why_not(h, dy, dh, weight):
            raise Declined(reason)
        m, n, *_ = rows_of(h) or (0, 0)
        strides = ((rows_of(t) or (0, 0, 0, 0))[2] for t in (dy, dh))
        config = configuration(h.device, h.dtype, bucket(n))
        sm, gain = target_sm(h.device), weight.element_size()
        cluster, group, stages, shared = backward.layout(sm, config, h.dtype, n, TENSORS, gain)
        sizes = f"{config['THREADS']}, {config['EACH']}, {group}, {stages}, {config['PER_SM']}"
        kernel = (
            f"dropped_norm_backward<{CTYPES[h.dtype]}, {CTYPES[weight.dtype]}, {sizes}, {str(seed_in_memory).lower()}>"
        )
        scalars = (*(ctypes.c_longlong(v) for v in (m, n, *strides)), ctypes.c_float(eps))
        one = CudaPlan(SOURCE, kernel, (cluster, 1), config["THREADS"], scalars, cluster, shared)
        self.n, self.clusters = n, min(-(-m // group), resident(one, h.device))
        self.rows = dataclasses.replace(one, grid=(self.clusters * cluster, 1), _ready=None)
        self.total = partial_sums.plan(self.clusters, n)

    def __call__(
        self,
        h: Tensor,
        dy: Tensor,
        dh: Tensor,
        weight: Tensor,
        dr: Tensor,
        dx: Tensor,
        dw: Tensor,
        seed_at: Tensor,
        seed: int,
        offset: int,
        last: int,
        scale: float,
    ) -> None:
        partial = torch.empty((self.clusters, self.n), dtype=torch.float32, device=h.device)
        numbers = ctypes.c_ulonglong(seed), ctypes.c_ulonglong(offset), ctypes.c_uint(last), ctypes.c_float(scale)
        rows = dataclasses.replace(self.rows, scalars=(*self.rows.scalars, *numbers))
        rows(h, dy, dh, weight, dr, partial, dx, seed_at)
        self.rows._ready = rows._ready  # the kernel, loaded once
        self.total(partial, dw)


plans = Plans(DroppedPlan)
