"""How ``argmax`` is launched: the tile of a program, the groups of elements that have one place, and one launch or several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.reduction import argmax_kernels
from weft.operators.reduction.plans import (
    FEW,
    LONGEST,
    TINY,
    Tiling,
    columns_heuristic,
    partial_view,
    rows_candidates,
    rows_heuristic,
    tiling,
)
from weft.operators.reduction.views import View

SHORT = 64  # rows up to here are one tile, of which a thread has no more than one load
LONG = 8192  # rows beyond are read by all warps of a program together


def wide_rows(dtype: torch.dtype, n: int) -> Config:
    reach = 8 * 32 * (16 // dtype.itemsize)
    return {"TILE": reach, "REACH": reach, "UNROLL": 4, "CHUNK": 2**16, "num_warps": 8}


def argmax_rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Rows of n elements. Lanes of a warp that share a row exchange their maxima at its end: few lanes, several loads each."""
    if n <= TINY:
        return rows_heuristic(sm, dtype, n)
    if n > LONG:
        return wide_rows(dtype, n)
    vector, warps = 16 // dtype.itemsize, 4
    tile = 32 * warps * vector
    if n <= SHORT:
        return {"TILE": 2 * tile, "REACH": n, "UNROLL": 1, "CHUNK": n, "num_warps": warps}
    reach = min(n // 4, 32 * vector)
    return {"TILE": tile, "REACH": reach, "UNROLL": min(n // reach, 8), "CHUNK": 2**16, "num_warps": warps}


def argmax_rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= TINY:
        return rows_candidates(sm, dtype, n)
    vector = 16 // dtype.itemsize
    every = grid_of({"EACH": (1, 2), "LANES": (4, 8, 16, 32, 128, 256), "UNROLL": (1, 2, 4, 8), "num_warps": (2, 4, 8)})
    found = []
    for c in every:
        tile, reach = c["EACH"] * 32 * c["num_warps"] * vector, c["LANES"] * vector
        if reach <= min(tile, n) and reach * c["UNROLL"] <= max(n, reach) and reach * 32 >= min(n, 4096):
            chunk = max(2**16, reach * c["UNROLL"])
            found.append(
                {"TILE": tile, "REACH": reach, "UNROLL": c["UNROLL"], "CHUNK": chunk, "num_warps": c["num_warps"]}
            )
    return found


def argmax_columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    if n <= TINY:
        return columns_heuristic(sm, dtype, n)
    if n < 2**14:
        return {"TILE": 1024, "WIDTH": 256, "UNROLL": 8, "CHUNK": 1024, "num_warps": 4}
    # the group that has won is read again, 32 bytes of memory for an element of 2: one of 512 groups in a part of N
    return {"TILE": 2048, "WIDTH": 256, "UNROLL": 8, "CHUNK": 4096, "num_warps": 8}


def argmax_columns_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= TINY:
        every = grid_of({"TILE": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)})
        return [{**c, "WIDTH": c["TILE"], "UNROLL": n, "CHUNK": n} for c in every]
    choices = {"TILE": (512, 1024, 2048, 4096), "WIDTH": (128, 256, 512), "UNROLL": (4, 8, 16)}
    every = grid_of({**choices, "CHUNK": (1024, 2048, 4096, 8192), "num_warps": (4, 8)})
    return [c for c in every if 4 <= c["TILE"] // (32 * c["num_warps"]) <= 16]


ROWS = Configurations(__file__, "argmax_rows", argmax_rows_heuristic, argmax_rows_candidates)
COLUMNS = Configurations(__file__, "argmax_columns", argmax_columns_heuristic, argmax_columns_candidates)
PARTIALS = (  # few, and nothing to measure
    Configurations(__file__, "argmax_partial_rows", argmax_rows_heuristic),
    Configurations(__file__, "argmax_partial_columns", argmax_columns_heuristic),
)


def argmax_tiling(
    v: View, device: torch.device, dtype: torch.dtype, kinds: tuple[Configurations, Configurations]
) -> tuple[Tiling, int]:
    """How a view is searched, and how many elements of a row are a group (0: those that a column's step unrolls)."""
    if v.K > 1 or v.N <= TINY:
        t = replace(tiling(v, device, dtype, kinds), flat=False)
        return t, 0
    config = kinds[0](device, dtype, min(bucket(v.N), LONGEST))
    rows = min(max(config["TILE"] // config["REACH"], 1), bucket(v.M))
    if config["REACH"] * config["UNROLL"] < v.N and triton.cdiv(v.M, rows) < 2 * multiprocessors(device):
        config, rows = wide_rows(dtype, v.N), 1  # too few programs: as many threads as there are for each row
    reach, unroll, length, few = config["REACH"], config["UNROLL"], config["CHUNK"], FEW
    if INTERPRETING:  # it calls a reduction's function once an element; and small tensors are to be cut into parts too
        reach, rows, length, few = min(reach, 128), min(rows, 8), min(length, 512), 1024
    reach = min(reach, bucket(v.N))
    if reach >= v.N:
        unroll = 1
    step = reach * unroll
    whole = triton.cdiv(v.N, step) * step
    chunk = whole if v.elements <= few else min(triton.cdiv(max(length, step), step) * step, whole)
    found = Tiling(rows, reach, 1, unroll, chunk, config["num_warps"])
    if found.blocks(v) >= 16 * multiprocessors(device) and whole < 2**31:
        found = replace(found, chunk=whole)  # enough programs without cutting N
    # what one load brings lies in one thread; of rows that begin anywhere, or are strided, that is one element
    group = min(v.unit(), 16 // dtype.itemsize) if v.dense_axis == 1 else 1
    return found, min(group, reach)


class ArgmaxPlan:
    """The launches of argmax: call with ``(x, out)``, out int64."""

    def __init__(self, v: View, device: torch.device, dtype: torch.dtype, *, total: bool = False):
        self.launches: list[Plan] = []
        self.partials: list[int] = []
        gather = False
        while True:
            t, group = argmax_tiling(v, device, dtype, PARTIALS if gather else (ROWS, COLUMNS))
            parts = t.parts(v)
            rest = partial_view((1, v.M * parts * v.K, 1) if total else (v.M, parts, v.K))
            last = rest.N == 1
            scalars = (v.M, v.N, v.K, parts, v.m, v.n, v.k, v.N if total else 0)
            constants = {
                "LAST": last,
                "GATHER": gather,
                "ROWS": t.rows,
                "REACH": t.reach,
                "COLS": t.cols,
                "UNROLL": t.unroll,
                "GROUP": group,
                "CHUNK": t.chunk,
                "ONCE": t.reach * t.unroll >= v.N,
                **t.constants(v),
            }
            grid = (t.blocks(v) * parts,)
            self.launches.append(Plan(argmax_kernels.argmax_tiles, grid, scalars, constants, t.num_warps))
            if last:
                return
            self.partials.append(rest.elements)
            v, dtype, gather, total = rest, torch.float32, True, False

    def __call__(self, x: Tensor, out: Tensor) -> None:
        source, places = x, out
        for size, launch in zip(self.partials, self.launches, strict=False):
            value = torch.empty(size, dtype=torch.float32, device=x.device)
            found = torch.empty(size, dtype=torch.int64, device=x.device)
            launch(source, places, value, found)
            source, places = value, found
        self.launches[-1](source, places, source, out)
