"""The plan of ``stream.cu``: the gradients of RMSNorm and LayerNorm of long rows in one pass, by groups of any number of blocks
(sm_90 and later)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators import partial_sums
from weft.operators.call import rows_of
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, driver
from weft.operators.launch import Plans, multiprocessors, target_sm
from weft.operators.normalization.backward import unaligned
from weft.operators.normalization.kind import Kind
from weft.operators.residency import resident, shared_limit

SOURCE = Path(__file__).parent / "stream.cu"
SHORTEST = 1024  # columns
WORTH_TUNING = 16384  # columns; shorter rows are verified, and left to clusters
REGISTERS = 65536  # of a multiprocessor
GATHERERS = 4  # warps, as in stream.cu; beside them one fetches and one publishes
MOST_PLACES = 32  # of a ring; more rows than any exchange takes


class CooperativePlan(CudaPlan):
    """A launch whose blocks wait for each other: all of them run at the same time, or the launch fails."""

    def _prepare(self, device: torch.device) -> tuple[Any, Any]:
        config, kernel = super()._prepare(device)
        cuda = driver()
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        config.attrs, config.numAttrs = [attribute], 1
        return config, kernel


class Geometry(NamedTuple):
    """Who does what: ``groups`` of ``members`` blocks, a block ``slice`` vectors of 16 bytes of each row; its warps, with the
    vectors that a lane has; ``rows`` rows in each of ``places`` of the ring, at most ``loads`` of which are being filled."""

    groups: int
    members: int
    slice: int
    adders: int
    added: int
    writers: int
    each: int
    rows: int
    places: int
    loads: int

    @property
    def threads(self) -> int:
        return 32 * (2 + GATHERERS + self.adders + self.writers)

    def shared(self, tensors: int) -> int:
        """Bytes of dynamic shared memory, laid out as in stream.cu."""
        return self.places * place_bytes(
            self.adders * self.added, self.writers * self.each, self.rows, tensors, self.adders
        )


def place_bytes(added: int, written: int, rows: int, tensors: int, adders: int) -> int:
    """A place of the ring, for the longer of what 32 lanes of adders and of writers take, with what is known of it: factors,
    statistics and sums of each row, four barriers."""
    return tensors * rows * 32 * max(added, written) * 16 + rows * (16 + 8 + 8 * adders) + 32


def registers(each: int, rows: int, dtype: torch.dtype, centered: bool, added: bool) -> int:
    """About what a writer's thread needs: weight and sums of its columns (for fp32 with what these lost), the words of the rows
    under work, and the rest."""
    columns = 16 // dtype.itemsize * each
    sums = (2 if centered else 1) * (2 if dtype == torch.float32 else 1)
    return columns * (1 + sums) + 4 * rows * (2 + added) + 34


def block(sm: int, c: Config, slice_: int, dtype: torch.dtype, centered: bool, added: bool) -> Geometry | None:
    """The block for slices of so many vectors (with groups and members still open), or None where it does not fit."""
    added_each, each = -(-slice_ // (32 * c["ADDERS"])), -(-slice_ // (32 * c["WRITERS"]))
    adders, writers = -(-slice_ // (32 * added_each)), -(-slice_ // (32 * each))
    for rows in (r for r in (4, 2, 1) if r <= c["ROWS"]):
        place = place_bytes(adders * added_each, writers * each, rows, 2 + added, adders)
        places = min(shared_limit(sm) // place, MOST_PLACES)
        loads = min(max(round(c["KIB"] / ((2 + added) * rows * slice_ / 64)), 2), places - 1)
        made = Geometry(0, 0, slice_, adders, added_each, writers, each, rows, places, loads)
        few = made.threads <= 1024
        if few and made.threads * registers(each, rows, dtype, centered, added) <= REGISTERS and places >= GATHERERS:
            return made
    return None


def geometry(
    sm: int, sms: int, c: Config, m: int, n: int, dtype: torch.dtype, centered: bool, added: bool
) -> Geometry | None:
    """Groups that leave the fewest multiprocessors without work, of slices near SLICE vectors: a slice of half or twice that
    counts as much as 2 % of the multiprocessors. Slices are multiples of GRAIN vectors: with 8 no line of 128 bytes is written
    by two blocks, with fewer work is spread more evenly. None where no slice fits."""
    vectors = n * dtype.itemsize // 16
    best, least = None, math.inf
    for groups in range(1, min(sms, m) + 1):
        slice_ = -(-vectors // (sms // groups * c["GRAIN"])) * c["GRAIN"]
        made = block(sm, c, slice_, dtype, centered, added)
        if made is None:
            continue
        steps = -(-m // made.rows)
        if groups > steps:
            break
        busy = groups * vectors / (sms * slice_) * steps / (groups * -(-steps // groups))
        cost = 1 - busy + 0.02 * abs(math.log2(slice_ / c["SLICE"]))
        if cost < least:
            best, least = made._replace(groups=groups, members=-(-vectors // slice_)), cost
    return best


def candidates(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Iterable[Config]:
    """Slices, rows of a step, warps; with 16 writers also more bytes under way, slices that share lines, and sums joined by one
    block of a group instead of by all. None for rows that clusters hold as well."""
    known = set()
    for change in ({}, {"WRITERS": 8, "ADDERS": 4}, {"KIB": 128}, {"GRAIN": 2}, {"RELAYED": 1}):
        for c in grid_of({"SLICE": (128, 256, 512), "ROWS": (1, 2, 4)}):
            c = {**c, "ADDERS": 8, "WRITERS": 16, "KIB": 64, "GRAIN": 8, "RELAYED": 0, **change}
            made = geometry(sm, 132, c, 2**28 // n, n, dtype, centered, False) if n >= WORTH_TUNING else None
            if made and made.rows == c["ROWS"] and (made, c["RELAYED"]) not in known:
                known.add((made, c["RELAYED"]))
                yield c


def heuristic(sm: int, dtype: torch.dtype, n: int, centered: bool) -> Config:
    """8 KiB of a tensor in a step: of 16-bit floats, where instructions are short, two rows share what a step takes."""
    narrow = dtype.itemsize == 2
    shape = {"SLICE": 256 if narrow else 512, "ROWS": 2 if narrow else 1}
    return {**shape, "ADDERS": 8, "WRITERS": 16, "KIB": 64, "GRAIN": 8, "RELAYED": 0}


configuration = Configurations(__file__, "backward_stream", heuristic, candidates)


def why_not(x: Tensor, dy: Tensor, weight: Tensor | None) -> str:
    """Why the kernel does not take these (an empty string when it does)."""
    few = f"{x.shape[-1]} columns; it takes {SHORTEST} and more" if x.shape[-1] < SHORTEST else ""
    return unaligned(x, dy, weight) or few


class StreamPlan:
    """The launches of the gradients; call it as :class:`backward.BackwardPlan`, which explains the arguments.

    The order of sums, so every bit of the result, depends on shapes, dtypes and the number of multiprocessors alone.
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
        if reason := why_not(x, dy, weight if weighted else None) or (added and why_not(more, more, None)):
            raise Declined(reason)
        sm, sms = target_sm(x.device), multiprocessors(x.device)
        m, n, x_row, _ = rows_of(x) or (0, 0, 0, 0)
        strides = (x_row, *((rows_of(t) or (0, 0, 0, 0))[2] for t in (dy, more, torch.empty_like(x, device="meta"))))
        config = configuration(x.device, x.dtype, bucket(n), centered)
        g = geometry(sm, sms, config, m, n, x.dtype, centered, added)
        if g is None:
            raise Declined(
                f"{n} columns: shared memory and registers of {sms} multiprocessors hold too few rows of them"
            )
        self.n, self.sums, self.groups = n, weighted * (2 if centered else 1), g.groups
        written = CTYPES[weight.dtype] if g.groups == 1 else "float"  # one group writes the gradient itself
        numbers = (g.adders, g.added, g.writers, g.each, g.rows, g.places, g.loads, -(-g.members // 32))
        flags = (config["RELAYED"], centered, weighted, added)
        arguments = (CTYPES[x.dtype], CTYPES[weight.dtype], written, *numbers, *(str(bool(f)).lower() for f in flags))
        kernel = f"norm_backward_stream<{', '.join(map(str, arguments))}>"
        longs = (ctypes.c_longlong(v) for v in (m, n, *strides))
        scalars = (*longs, ctypes.c_uint(g.members), ctypes.c_uint(g.slice), ctypes.c_float(eps))
        grid = (g.groups * g.members, 1)
        self.rows = CooperativePlan(SOURCE, kernel, grid, g.threads, scalars, shared_bytes=g.shared(2 + added))
        if resident(self.rows, x.device) < grid[0]:
            raise Declined(f"{grid[0]} blocks that wait for each other; fewer run at the same time on this device")
        self.words = -(-m // g.rows) * g.rows * (g.members + config["RELAYED"])
        self.total = partial_sums.plan(self.groups, n, max(self.sums, 1))

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
        words = torch.zeros(self.words, dtype=torch.int64, device=x.device)
        if self.groups == 1 or not self.sums:
            dw, db = (dweights[0], dweights[-1]) if self.sums else (x, x)
            self.rows(x, dy, more, weight, mean, rstd, words, dx, dw, db)
        else:
            partial = torch.empty((self.sums, self.groups, self.n), dtype=torch.float32, device=x.device)
            self.rows(x, dy, more, weight, mean, rstd, words, dx, partial[0], partial[-1])
            self.total(partial, dweights)


plans = Plans(StreamPlan)
