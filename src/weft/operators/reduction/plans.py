"""How reductions are launched: the tile of a program, and one launch or several."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.reduction import kernels
from weft.operators.reduction.views import View

# ---- tiles -----------------------------------------------------------------------------------------------------------

TINY = 8  # extents up to here may be walked in registers, one element of each result at a time
LONGEST = 2**18  # extents beyond are configured alike
FEW = 2**16  # elements that are not worth a second launch


def rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Rows of n elements (a power of two; up to TINY the extent itself)."""
    if n <= TINY:
        power = bucket(n) == n
        return {"TILE": 4096 if power else 1024, "WALK": 0 if power else 1, "num_warps": 4}
    if n > 4096:
        return {"TILE": 8192, "CHUNK": 2**16, "num_warps": 8}
    return {"TILE": 4096, "CHUNK": 2**16, "num_warps": 4}


def rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= TINY:
        walk = grid_of({"TILE": (256, 512, 1024, 2048), "WALK": (1,), "num_warps": (2, 4, 8)})
        return [*walk, *grid_of({"TILE": (2048, 4096, 8192), "WALK": (0,), "num_warps": (2, 4, 8)})]
    # several loads before the first sum: as one tile they would take a register an element for sums as well
    steps = {"TILE": (512, 1024, 2048, 4096, 8192), "UNROLL": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16)}
    chunks = (2**16,) if n <= 4096 else (2**14, 2**16, 2**18)
    vector = 16 // dtype.itemsize

    def sound(c: Config) -> bool:
        each = c["TILE"] // (32 * c["num_warps"])
        long = c["UNROLL"] == 1 or c["TILE"] * c["UNROLL"] <= n
        return (
            vector <= each <= 32 and 16 <= each * c["UNROLL"] <= 64 and long and c["TILE"] * c["UNROLL"] >= min(n, 4096)
        )

    return [c for c in grid_of({**steps, "CHUNK": chunks}) if sound(c)]


def columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Columns of n elements; CHUNK counts elements of one column."""
    if n <= TINY:
        return {"TILE": 1024, "WIDTH": 1024, "UNROLL": n, "CHUNK": n, "num_warps": 4}
    return {"TILE": 2048, "WIDTH": 256, "UNROLL": 4, "CHUNK": 1024, "num_warps": 4}


def columns_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= TINY:
        every = grid_of({"TILE": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)})
        return [{**c, "WIDTH": c["TILE"], "UNROLL": n, "CHUNK": n} for c in every]
    choices = {"TILE": (1024, 2048, 4096), "WIDTH": (128, 256, 512, 1024), "UNROLL": (1, 2, 4, 8)}
    every = grid_of({**choices, "CHUNK": (256, 1024), "num_warps": (4, 8)})
    return [c for c in every if 16 <= c["TILE"] * c["UNROLL"] // (32 * c["num_warps"]) <= 64]


def partials_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    if n <= TINY:
        return rows_heuristic(sm, dtype, n)
    return {"TILE": 4096 if n > 2048 else 2048, "CHUNK": 2**16, "num_warps": 8 if n > 2048 else 4}


ROWS = Configurations(__file__, "rows", rows_heuristic, rows_candidates)
COLUMNS = Configurations(__file__, "columns", columns_heuristic, columns_candidates)
# Partial results are few: nothing to measure, and what is measured for a first launch is not theirs.
PARTIALS = (
    Configurations(__file__, "partial_rows", partials_heuristic),
    Configurations(__file__, "partial_columns", columns_heuristic),
)


@dataclass(frozen=True)
class Tiling:
    """Tiles [rows, reach, cols], ``unroll`` of them one after the other along N, and how N is cut into parts."""

    rows: int
    reach: int
    cols: int
    unroll: int
    chunk: int
    num_warps: int
    flat: bool = False

    def blocks(self, v: View) -> int:
        return triton.cdiv(v.M, self.rows) * triton.cdiv(v.K, self.cols)

    def parts(self, v: View) -> int:
        return triton.cdiv(v.N, self.chunk)

    def constants(self, v: View, *others: View) -> dict[str, Any]:
        return {"UNIT": v.unit(*others), "DENSE": v.dense_axis}


def tiling(v: View, device: torch.device, dtype: torch.dtype, kinds: tuple[Configurations, Configurations]) -> Tiling:
    """How a view is reduced, by the configurations for rows (K = 1) and for columns."""
    key = v.N if v.N <= TINY else min(bucket(v.N), LONGEST)
    config = kinds[v.K > 1](device, dtype, key)
    warps, tile, length, few = config["num_warps"], config["TILE"], config.get("CHUNK", 0), FEW
    if INTERPRETING:  # it calls a reduction's function once an element; and small tensors are to be cut into parts too
        tile, length, few = min(tile, 256), min(length, 512), 1024
    if v.K == 1 and v.N <= TINY:
        if config["WALK"]:
            return Tiling(min(tile, bucket(v.M)), 1, 1, v.N, v.N, warps)
        reach = bucket(v.N)
        flat = v.n == 1 and v.m == v.N == reach
        return Tiling(min(tile // reach, bucket(v.M)), reach, 1, 1, reach, warps, flat)
    unroll = config.get("UNROLL", 1)
    cols = min(bucket(v.K), config.get("WIDTH", 1), tile)
    reach = 1 if v.N <= TINY else min(bucket(v.N), tile // cols)
    rows = min(tile // (cols * reach), bucket(v.M)) if reach * unroll >= v.N else 1
    if reach >= v.N:
        unroll = 1
    step = reach * unroll
    whole = triton.cdiv(v.N, step) * step
    chunk = whole if v.elements <= few else min(triton.cdiv(max(length, step), step) * step, whole)
    found = Tiling(rows, reach, cols, unroll, chunk, warps)
    if found.blocks(v) >= 16 * multiprocessors(device) and whole < 2**31:
        found = replace(found, chunk=whole)  # enough programs without cutting N
    return found


# ---- plans -----------------------------------------------------------------------------------------------------------


SUM, LARGEST = (kernels.plus, kernels.added), (kernels.larger, kernels.largest)


@dataclass(frozen=True)
class Formula:
    """What a reduction computes; the fields are Triton functions of ``kernels``.

    Args:
        map, join, finish: an element's contribution, the join of two and of a tile, the result of the total.
        neutral: what joins without effect.
        other: the value of x that counts for nothing.
        compared: map takes the result of an earlier reduction too.
    """

    map: Any
    join: tuple[Any, Any]
    finish: Any = kernels.keep
    neutral: float = 0.0
    other: float = 0.0
    compared: bool = False

    @property
    def again(self) -> Formula:
        """What joins the partial results of this one."""
        return Formula(kernels.itself, self.join, self.finish, self.neutral, self.neutral)


def reduce_launch(
    v: View, t: Tiling, formula: Formula, finish: Any, divisor: float = 1.0, y: tuple[int, int] = (0, 0)
) -> Plan:
    scalars = (v.M, v.N, v.K, t.parts(v), v.m, v.n, v.k, *y, divisor)
    constants = {
        "MAP": formula.map,
        "COMBINE": formula.join[0],
        "FOLD": formula.join[1],
        "FINISH": finish,
        "NEUTRAL": formula.neutral,
        "OTHER": formula.other,
        "COMPARED": formula.compared,
        "ROWS": t.rows,
        "REACH": t.reach,
        "COLS": t.cols,
        "UNROLL": t.unroll,
        "CHUNK": t.chunk,
        "ONCE": t.reach * t.unroll >= v.N,
        "FLAT": t.flat,
        **t.constants(v),
    }
    return Plan(kernels.reduce_tiles, (t.blocks(v) * t.parts(v),), scalars, constants, t.num_warps)


def partial_view(shape: tuple[int, int, int]) -> View:
    m, s, k = shape
    return View(m, s, k, s * k, k, 1) if k > 1 else View(m, s, 1, s, 1, 0)


class ReducePlan:
    """The launches of one reduction: call with ``(x, out)``.

    A first launch writes a partial result for each part of N, in fp32; others join them until one is left. Nothing is
    added by atomics, so the order, and every bit of the result, is the same each time.

    Args:
        total: of a view [M, N, 1]: the results of its rows are joined too.
    """

    def __init__(
        self, v: View, device: torch.device, dtype: torch.dtype, formula: Formula, divisor: float = 1.0, *, total: bool = False,
        kinds: tuple[Configurations, Configurations] = (ROWS, COLUMNS),
    ):  # fmt: skip
        self.launches: list[Plan] = []
        self.partials: list[int] = []
        while True:
            t = tiling(v, device, dtype, PARTIALS if self.launches else kinds)
            parts = t.parts(v)
            rest = partial_view((1, v.M * parts * v.K, 1) if total else (v.M, parts, v.K))
            last = rest.N == 1
            self.launches.append(reduce_launch(v, t, formula, formula.finish if last else kernels.keep, divisor))
            if last:
                return
            self.partials.append(rest.elements)
            v, formula, dtype, total = rest, formula.again, torch.float32, False

    def __call__(self, x: Tensor, out: Tensor) -> None:
        source = x
        for size, launch in zip(self.partials, self.launches, strict=False):
            partial = torch.empty(size, dtype=torch.float32, device=x.device)
            launch(source, source, partial)  # in the place of y, which the formula compares with nothing
            source = partial
        self.launches[-1](source, source, out)


@dataclass(frozen=True)
class Spread:
    """The gradient of a reduction: Triton functions of ``kernels``.

    Args:
        gradient: ``(x, y, dy, ties) -> dx``.
        tie: ``(x, y) -> 1`` for the elements that share a gradient; None where each has its own.
        other, unseen: values of x that are no tie: outside of the tensor, and where there is none (``spread_tiles``).
        bits: whether all it needs of x is which elements equal y, so that forward may keep a bit of each (``kept.py``).
    """

    gradient: Any
    tie: Any = None
    other: float = 0.0
    unseen: float = 0.0
    bits: bool = False


def spread_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    return {"TILE": 2048 if n <= 2048 else min(n, 4096), "num_warps": 4}


def spread_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    every = grid_of({"TILE": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8, 16)})
    return [c for c in every if 4 <= c["TILE"] // (32 * c["num_warps"]) <= 32 and c["TILE"] >= min(n, 8192)]


SPREAD = Configurations(__file__, "spread", spread_heuristic, spread_candidates)
SPAN = 4096  # elements along N that are counted together


class SpreadPlan:
    """The launches of a gradient: call with ``(x, y, dy, dx)``; y [M, K] is dense.

    Where a tile holds all of N, ties are counted there. Elsewhere a first reduction counts them in spans, a second adds
    those up, and x is read again only in the spans that have any: about one read of x and one write of dx in all.
    """

    def __init__(self, v: View, dx: View, dy: tuple[int, int], x: Tensor, spread: Spread, *, total: bool):
        device, dtype = x.device, x.dtype
        y = (0, 0) if total else (v.K, 1)
        tile = SPREAD(device, dtype, min(bucket(v.N), LONGEST))
        most, warps = tile["TILE"], tile["num_warps"]
        if INTERPRETING:
            most = min(most, 256)
        cols = min(bucket(v.K), 64 if v.N > 16 else 512, most)
        reach = min(bucket(v.N), most // cols)
        rows = min(most // (cols * reach), bucket(v.M))
        t = Tiling(rows, reach, cols, 1, reach, warps)
        here = reach >= v.N and not (total and v.M * v.K > 1)  # a program has before it all that share a result
        self.v, self.count = v, 0 if spread.tie is None else 1 if here else 2
        span, self.spans = reach, 1
        if self.count == 2:
            ties = Formula(spread.tie, SUM, other=spread.other, compared=True)
            whole = tiling(v, device, dtype, (ROWS, COLUMNS))
            step = math.lcm(whole.reach * whole.unroll, reach)
            span = triton.cdiv(max(SPAN // cols, step), step) * step
            self.spans = triton.cdiv(v.N, span)
            self.hits = reduce_launch(v, replace(whole, chunk=span, rows=1, flat=False), ties, kernels.keep, y=y)
            every = partial_view((1, v.M * self.spans * v.K, 1) if total else (v.M, self.spans, v.K))
            self.ties = ReducePlan(every, device, torch.float32, ties.again, kinds=PARTIALS)
        self.span = span
        scalars = (v.M, v.N, v.K, t.parts(v), self.spans, v.m, v.n, v.k, *y, *dy, dx.m, dx.n, dx.k)
        constants = {
            "F": spread.gradient,
            "TIE": spread.tie,
            "UNSEEN": spread.unseen,
            "COUNT": self.count,
            "SPAN": span,
            "ROWS": rows,
            "REACH": reach,
            "COLS": cols,
            **t.constants(v, dx),
        }
        self.spread = Plan(kernels.spread_tiles, (t.blocks(v) * t.parts(v),), scalars, constants, warps)

    def __call__(self, x: Tensor, y: Tensor, dy: Tensor, dx: Tensor) -> None:
        hits = ties = y
        if self.count == 2:
            hits = torch.empty(self.v.M * self.spans * self.v.K, dtype=torch.float32, device=x.device)
            ties = torch.empty(self.v.M * self.v.K, dtype=torch.float32, device=x.device)
            self.hits(x, y, hits)
            self.ties(hits, ties)
        self.spread(x, y, dy, ties, hits, dx)
