"""The plan of ``backward.cu``: the gradients of RMSNorm and LayerNorm in one pass over memory (sm_90 and later); and what
plans of other kernels on ``backward.cuh`` share with it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import partial_sums
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans, target_sm
from weft.operators.normalization.kind import Kind
from weft.operators.residency import resident, shared_limit
from weft.operators.row_cluster import MAX_CLUSTER

SOURCE = Path(__file__).parent / "backward.cu"
SHORTEST = 256  # columns: a warp's worth of 16-byte vectors
SYSTEM = 1024  # bytes of shared memory that the system takes for a block
REGISTERS = 65536


def own(rows: int, threads: int) -> int:
    """Bytes of shared memory that a block takes besides the ring and the weight: the system's, barriers, sums."""
    return SYSTEM + 256 + rows * (512 + threads // 2)


def registers(each: int, rows: int, dtype: torch.dtype, centered: bool) -> int:
    """About what a thread needs: its partial sums (for fp32 with what they lost), the sums of each row, and the rest."""
    return each * (2 if centered else 1) * (2 if dtype == torch.float32 else 1) + 34 + 10 * rows


def fits(sm: int, c: Config, dtype: torch.dtype, n: int, centered: bool, tensors: int = 2) -> bool:
    """Whether registers and shared memory hold PER_SM such blocks, and 16 blocks a row of so many tensors that are read."""
    held, item = c["THREADS"] * c["EACH"], dtype.itemsize
    shared = (c["STAGES"] * c["ROWS"] * tensors + 1) * held * item + own(c["ROWS"], c["THREADS"])
    enough = c["THREADS"] * registers(c["EACH"], c["ROWS"], dtype, centered) * c["PER_SM"] <= REGISTERS
    return enough and shared * c["PER_SM"] <= shared_limit(sm) + SYSTEM and n <= held * MAX_CLUSTER


def candidates(sm: int, dtype: torch.dtype, n: int, centered: bool, tensors: int = 2) -> Iterable[Config]:
    """Slices of a row by blocks, rows of a group, stages of the ring, and as many blocks a multiprocessor as fit, or half."""
    vector = 16 // dtype.itemsize
    choices = {
        "THREADS": (32, 64, 128, 256, 512, 1024),
        "EACH": (vector, 2 * vector, 4 * vector),
        "ROWS": (1, 2, 4),
        "STAGES": (3, 4, 6),
    }
    for c in grid_of(choices):
        held = c["THREADS"] * c["EACH"]
        if held >= 2 * n and held > 32 * vector:
            continue
        if c["ROWS"] * held * dtype.itemsize > 32 * 1024 or (c["ROWS"] > 1 and c["STAGES"] > 4):
            continue  # enough is under way
        most = max(
            (
                p
                for p in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
                if fits(sm, {**c, "PER_SM": p}, dtype, n, centered, tensors)
            ),
            default=0,
        )
        for per_sm in dict.fromkeys((most, (most + 1) // 2)):
            under_way = (c["STAGES"] - 1) * c["ROWS"] * tensors * held * dtype.itemsize * per_sm
            if per_sm and 256 <= c["THREADS"] * per_sm <= 2048 and under_way >= 32 * 1024:
                yield {**c, "PER_SM": per_sm}


def heuristic(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Config:
    """The fewest blocks a row with at least 512 threads and 64 KiB under way on a multiprocessor; of 16-bit floats two rows
    a group, since they are limited by instructions."""
    pair = 2 if dtype.itemsize == 2 else 1

    def rank(c: Config) -> tuple[int, ...]:
        held = c["THREADS"] * c["EACH"]
        busy = c["THREADS"] * c["PER_SM"] >= 512
        under_way = (c["STAGES"] - 1) * c["ROWS"] * 2 * held * dtype.itemsize * c["PER_SM"] >= 64 * 1024
        shape = (bucket(-(-n // held)), abs(c["ROWS"] - pair), c["EACH"], c["STAGES"], -c["PER_SM"])
        return (-int(busy and under_way), *shape)

    return min(candidates(sm, dtype, n, centered), key=rank)


@functools.cache
def longest(sm: int, dtype: torch.dtype, centered: bool) -> int:
    """Columns of the longest rows whose partial sums registers and shared memory hold."""
    return next(2**e for e in range(18, -1, -1) if any(True for _ in candidates(sm, dtype, 2**e, centered)))


configuration = Configurations(__file__, "backward_cluster", heuristic, candidates)


def of_two(sm: int, *key: Any) -> Config:
    """What was chosen for two tensors, where nothing is known of three."""
    return configuration.table(sm).get(configuration.key(*key)) or heuristic(sm, *key)


def candidates_of_three(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Iterable[Config]:
    return candidates(sm, dtype, n, centered, tensors=3)


# With a third tensor fewer blocks fit on a multiprocessor, and a choice that has few warps is left with too few.
added_configuration = Configurations(__file__, "backward_cluster_added", of_two, candidates_of_three)


def unaligned(x: Tensor, dy: Tensor, weight: Tensor | None) -> str:
    """Why these cannot be read 16 bytes at a time (an empty string when they can)."""
    count = 16 // x.element_size()
    for t in (x, dy):
        rows = rows_of(t)
        if (
            rows is None
            or (rows[3] != 1 and rows[1] > 1)
            or rows[1] % count
            or rows[2] % count
            or not pointer_aligned(t)
        ):
            return "rows that do not begin and end on 16 bytes"
    return "" if weight is None or pointer_aligned(weight) else "a weight that does not begin on 16 bytes"


def why_not(x: Tensor, dy: Tensor, weight: Tensor | None, centered: bool) -> str:
    """Why the kernel does not take these (an empty string when it does)."""
    n, most = x.shape[-1], longest(target_sm(x.device), x.dtype, centered)
    return unaligned(x, dy, weight) or ("" if SHORTEST <= n <= most else f"{n} columns; it takes {SHORTEST} … {most}")


class Layout(NamedTuple):
    """How a row lies over blocks, and what of their shared memory the ring takes."""

    cluster: int  # blocks that share a row
    rows: int  # of a group
    stages: int
    shared: int  # bytes


def layout(sm: int, config: Config, dtype: torch.dtype, n: int, tensors: int, gain_bytes: int) -> Layout:
    """Of a configuration and so many tensors that are read, with ``gain_bytes`` for an element of the weight (0: none).

    Raises:
        Declined: not even one row a group fits.
    """
    held = config["THREADS"] * config["EACH"]
    row = held * tensors * dtype.itemsize
    # with a third tensor, or a float32 weight, what was chosen for two may not fit
    for rows in (r for r in (4, 2, 1) if r <= config["ROWS"]):
        room = shared_limit(sm) + SYSTEM - own(rows, config["THREADS"]) - held * gain_bytes
        stages = min(config["STAGES"], room // (rows * row))
        if stages >= 3:
            return Layout(bucket(-(-n // held)), rows, stages, stages * rows * row + held * gain_bytes)
    raise Declined(f"{n} columns with a third tensor or a float32 weight; shared memory holds fewer")


class BackwardPlan:
    """The launches of the gradients of ``norm(x) * weight + bias``.

    Call with ``(x, dy, more, weight, mean, rstd, dx, dweights)``: x, dy, more, dx are rows [M, N]; ``more`` is added to dx;
    mean and rstd are fp32 [M] (LayerNorm; RMSNorm needs neither); dweights is [1, N] for the weight's gradient, [2, N] for
    the weight's and the bias's. What is not there is stood in for by any tensor.
    """

    def __init__(
        self,
        x: Tensor,
        dy: Tensor,
        more: Tensor,
        weight: Tensor,
        eps: float,
        kind: Kind,
        added: bool,
    ):
        centered, weighted = kind.centered, kind.weighted
        if reason := why_not(x, dy, weight if weighted else None, centered) or (
            added and why_not(more, more, None, centered)
        ):
            raise Declined(reason)
        m, n, x_row, _ = rows_of(x) or (0, 0, 0, 0)
        strides = (x_row, *((rows_of(t) or (0, 0, 0, 0))[2] for t in (dy, more, torch.empty_like(x, device="meta"))))
        config = (added_configuration if added else configuration)(x.device, x.dtype, bucket(n), centered)
        flags = ", ".join(str(f).lower() for f in (centered, weighted, added))
        gain = weighted * weight.element_size()
        cluster, group, stages, shared = layout(target_sm(x.device), config, x.dtype, n, 2 + added, gain)
        sizes = f"{config['THREADS']}, {config['EACH']}, {group}, {stages}, {config['PER_SM']}"
        kernel = f"norm_backward<{CTYPES[x.dtype]}, {CTYPES[weight.dtype]}, {sizes}, {flags}>"
        scalars = (*(ctypes.c_longlong(v) for v in (m, n, *strides)), ctypes.c_float(eps))
        one = CudaPlan(SOURCE, kernel, (cluster, 1), config["THREADS"], scalars, cluster, shared)
        self.clusters = min(-(-m // group), resident(one, x.device))
        self.rows = CudaPlan(SOURCE, kernel, (self.clusters * cluster, 1), config["THREADS"], scalars, cluster, shared)
        self.n, self.sums = n, weighted * (2 if centered else 1)
        self.total = partial_sums.plan(self.clusters, n, max(self.sums, 1))

    def __call__(
        self,
        x: Tensor,
        dy: Tensor,
        more: Tensor,
        weight: Tensor,
        mean: Tensor,
        rstd: Tensor,
        dx: Tensor,
        dweights: Tensor,
    ) -> None:
        partial = torch.empty(
            (max(self.sums, 1), self.clusters, self.n if self.sums else 0), dtype=torch.float32, device=x.device
        )
        self.rows(x, dy, more, weight, mean, rstd, dx, partial[0], partial[-1])
        if self.sums:
            self.total(partial, dweights)


plans = Plans(BackwardPlan)
