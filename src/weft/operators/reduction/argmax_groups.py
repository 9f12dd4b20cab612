"""The Triton kernel of ``argmax`` over a view [M, N, K] of a tensor along N, and its launches.

An index beside every value costs a dozen instructions an element, which is more than memory leaves time for. So the maximum
is taken of groups of neighbouring elements, one instruction an element; the index is that of a group, and the element is
looked up once, in the group that has the maximum.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.axis_view import AxisView
from weft.operators.configs import Config, Configurations, bucket, grid_of, tiles
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.reduction import kernels
from weft.operators.reduction.kernels import known_strides, larger, tile_of_program

FAR = tl.constexpr(2147483647)  # larger than every index


@triton.jit
def above(a, b):
    """NaN is above everything else, and not above itself."""
    return (a > b) | ((a != a) & (b == b))


@triton.jit
def first_index(x, top, indices):
    """The lowest index, along axis 1, of the x [ROWS, any, COLS] that equal their maximum top [ROWS, COLS]; of NaN the lowest
    if there is any."""
    return tl.min(tl.where((x == top[:, None, :]) | (x != x), indices, FAR), axis=1)


@triton.jit
def load_tile(lane, apart, u, inside, n, left, REACH: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr):
    """The tile u of a step; -inf outside."""
    if not WHOLE:
        inside = inside & (n + (u if GROUP == 0 else u * REACH) < left)
    return tl.load(lane + u * apart, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def search_step(
    best, found, lane, apart, inside, n, start, left,
    REACH: tl.constexpr, UNROLL: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The maximum of each thread's groups, and where its group starts, after the step that starts at ``start``."""
    if GROUP == 0:
        top = load_tile(lane, apart, 0, inside, n, left, REACH, GROUP, WHOLE)
        for u in tl.static_range(1, UNROLL):
            top = larger(top, load_tile(lane, apart, u, inside, n, left, REACH, GROUP, WHOLE))
        found = tl.where(above(top, best), start, found)
        best = larger(best, top)
    else:
        for u in tl.static_range(UNROLL):
            top = load_tile(lane, apart, u, inside, n, left, REACH, GROUP, WHOLE)
            if GROUP > 1:
                top = tl.reduce(tl.reshape(top, [top.shape[0], REACH // GROUP, GROUP, top.shape[2]]), 2, larger)
            found = tl.where(above(top, best), start + u * REACH, found)
            best = larger(best, top)
    return best, found


@triton.jit
def argmax_tiles(
    x_ptr, from_ptr, value_ptr, index_ptr, M, N, K, PARTS, x_m, x_n, x_k, row_length,
    LAST: tl.constexpr, GATHER: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, REACH: tl.constexpr, COLS: tl.constexpr, UNROLL: tl.constexpr,
    CHUNK: tl.constexpr, ONCE: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """index[m, part, k] = the lowest n at which x[m, n, k] is largest, plus m * row_length; value[m, part, k] = that x
    (not written by the LAST launch).

    GROUP neighbouring elements along N share an index until the end: in a row the elements of one 16-byte load, so that a step
    is UNROLL tiles one after the other; 0 for columns, where UNROLL loads are a group and the REACH groups of a step follow
    each other. Elements outside of the tensor are -inf and behind all others, so they are never the first maximum.

    With GATHER x are the values of an earlier launch and from[m, n, k] their indices: the result is one of those.
    """
    N, K, x_m, x_n, x_k = known_strides(N, K, x_m, x_n, x_k, UNIT, DENSE)
    row, part, col = tile_of_program(K, PARTS, ROWS, COLS)
    m = tl.arange(0, ROWS)[:, None, None]
    n = tl.arange(0, REACH)[None, :, None]
    k = tl.arange(0, COLS)[None, None, :]
    there = (m < M - row) & (k < K - col)
    first = part * CHUNK
    x_ptr += row * x_m + first * x_n + col * x_k
    across = m.to(tl.int64) * x_m + k.to(tl.int64) * x_k
    if ONCE and UNROLL == 1:  # the whole extent is in registers
        x = tl.load(x_ptr + across + n.to(tl.int64) * x_n, mask=there & (n < N), other=-float("inf")).to(tl.float32)
        top = tl.reduce(x, 1, larger)
        found = first_index(x, top, n)
    elif ONCE and REACH == 1:  # a thread walks the whole extent
        top = tl.full([ROWS, 1, COLS], -float("inf"), tl.float32)
        found = tl.full([ROWS, 1, COLS], 0, tl.int32)
        for u in tl.static_range(UNROLL):
            x = tl.load(x_ptr + u * x_n + across, mask=there & (u < N), other=-float("inf")).to(tl.float32)
            found = tl.where(above(x, top), u, found)
            top = larger(top, x)
        top, found = tl.reshape(top, [ROWS, COLS]), tl.reshape(found, [ROWS, COLS])
    else:
        GROUPS: tl.constexpr = REACH // GROUP if GROUP > 0 else REACH
        LENGTH: tl.constexpr = GROUP if GROUP > 0 else UNROLL
        best = tl.full([ROWS, GROUPS, COLS], -float("inf"), tl.float32)
        found = tl.full([ROWS, GROUPS, COLS], 0, tl.int32)  # the tile that best is from, without the index in it
        n *= 1 if GROUP > 0 else UNROLL
        apart = tl.full((), REACH if GROUP > 0 else 1, tl.int64) * x_n
        lane = x_ptr + across + n.to(tl.int64) * x_n
        start, left = 0, N - first
        if not ONCE:
            for _ in range(0, (tl.minimum(left, CHUNK) // (REACH * UNROLL)).to(tl.int32)):
                best, found = search_step(best, found, lane, apart, there, n, start, left, REACH, UNROLL, GROUP, True)
                lane += tl.full((), REACH * UNROLL, tl.int64) * x_n
                start += REACH * UNROLL
        if ONCE or start < tl.minimum(left, CHUNK):
            best, found = search_step(
                best, found, lane, apart, there, n, start, left - start, REACH, UNROLL, GROUP, False
            )
        top = tl.reduce(best, 1, larger)
        found = first_index(best, top, found + tl.arange(0, GROUPS)[None, :, None] * LENGTH)
        if LENGTH > 1:
            at = found[:, None, :] + tl.arange(0, LENGTH)[None, :, None]
            inside = there & (at < left)
            x = tl.load(x_ptr + across + at.to(tl.int64) * x_n, mask=inside, other=-float("inf")).to(tl.float32)
            found = first_index(x, top, at)
    m = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, COLS)[None, :]
    there = (m < M - row) & (k < K - col)
    out = ((row + m) * PARTS + part) * K + col + k
    if GATHER:
        result = tl.load(from_ptr + ((row + m) * N + first + found) * K + col + k, mask=there)
    else:
        result = first + found + (row + m) * row_length
    tl.store(index_ptr + out, result, mask=there)
    if not LAST:
        tl.store(value_ptr + out, top, mask=there)


ONE_LOAD = 64  # rows up to here are one tile, of which a thread has no more than one load
LONG = 8192  # rows beyond are read by all warps of a program together


def wide_rows(dtype: torch.dtype, n: int) -> Config:
    reach = 8 * 32 * (16 // dtype.itemsize)
    return {"TILE": reach, "REACH": reach, "UNROLL": 4, "CHUNK": 2**16, "num_warps": 8}


def argmax_rows_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    """Rows of n elements. The lanes that share a row exchange their maxima at its end: few lanes, several loads each."""
    if n <= kernels.SHORT:
        return kernels.rows_heuristic(sm, dtype, n)
    if n > LONG:
        return wide_rows(dtype, n)
    vector, warps = 16 // dtype.itemsize, 4
    tile = 32 * warps * vector
    if n <= ONE_LOAD:
        return {"TILE": 2 * tile, "REACH": n, "UNROLL": 1, "CHUNK": n, "num_warps": warps}
    reach = min(n // 4, 32 * vector)
    return {"TILE": tile, "REACH": reach, "UNROLL": min(n // reach, 8), "CHUNK": 2**16, "num_warps": warps}


def argmax_rows_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= kernels.SHORT:
        return kernels.rows_candidates(sm, dtype, n)
    vector = 16 // dtype.itemsize
    every = grid_of({"EACH": (1, 2), "LANES": (4, 8, 16, 32, 128, 256), "UNROLL": (1, 2, 4, 8), "num_warps": (2, 4, 8)})
    found = []
    for c in every:
        tile, reach, unroll = c["EACH"] * 32 * c["num_warps"] * vector, c["LANES"] * vector, c["UNROLL"]
        if reach <= min(tile, n) and reach * unroll <= max(n, reach) and reach * 32 >= min(n, 4096):
            shape = {"TILE": tile, "REACH": reach, "UNROLL": unroll, "CHUNK": max(2**16, reach * unroll)}
            found.append({**shape, "num_warps": c["num_warps"]})
    return found


def argmax_columns_heuristic(sm: int, dtype: torch.dtype, n: int) -> Config:
    if n <= kernels.SHORT:
        return kernels.columns_heuristic(sm, dtype, n)
    if n < 2**14:
        return {"TILE": 1024, "WIDTH": 256, "UNROLL": 8, "CHUNK": 1024, "num_warps": 4}
    # the group with the maximum is read again, 32 bytes of memory for an element of 2: one of 512 groups in a part of N
    return {"TILE": 2048, "WIDTH": 256, "UNROLL": 8, "CHUNK": 4096, "num_warps": 8}


def argmax_columns_candidates(sm: int, dtype: torch.dtype, n: int) -> Any:
    if n <= kernels.SHORT:
        return kernels.short_columns_candidates(n)
    choices = {"TILE": (512, 1024, 2048, 4096), "WIDTH": (128, 256, 512), "UNROLL": (4, 8, 16)}
    return tiles({**choices, "CHUNK": (1024, 2048, 4096, 8192), "num_warps": (4, 8)}, 4, 16)


# of rows and of columns
FIRST = (
    Configurations(__file__, "argmax_rows", argmax_rows_heuristic, argmax_rows_candidates),
    Configurations(__file__, "argmax_columns", argmax_columns_heuristic, argmax_columns_candidates),
)
PARTIALS = (  # few: there is nothing to measure
    Configurations(__file__, "argmax_partial_rows", argmax_rows_heuristic),
    Configurations(__file__, "argmax_partial_columns", argmax_columns_heuristic),
)


def argmax_tiling(
    v: AxisView, device: torch.device, dtype: torch.dtype, kinds: tuple[Configurations, ...]
) -> tuple[kernels.Tiling, int]:
    """How a view is searched, and how many elements of a row are a group (0: the elements that a column's step unrolls)."""
    if v.K > 1 or v.N <= kernels.SHORT:
        return replace(kernels.tiling(v, device, dtype, kinds), flat=False), 0
    config = kinds[0](device, dtype, min(bucket(v.N), kernels.LONGEST))
    rows = min(max(config["TILE"] // config["REACH"], 1), bucket(v.M))
    if config["REACH"] * config["UNROLL"] < v.N and triton.cdiv(v.M, rows) < 2 * multiprocessors(device):
        config, rows = wide_rows(dtype, v.N), 1  # too few programs: as many threads as there are for each row
    reach, unroll, length, few = config["REACH"], config["UNROLL"], config["CHUNK"], kernels.FEW
    if INTERPRETING:  # it calls a reduction's function once an element; and small tensors are to be cut into parts too
        reach, rows, length, few = min(reach, 128), min(rows, 8), min(length, 512), 1024
    reach = min(reach, bucket(v.N))
    if reach >= v.N:
        unroll = 1
    found = kernels.Tiling(rows, reach, 1, unroll, 0, config["num_warps"]).in_parts(v, length, few, device)
    # the elements of one load lie in one thread; in rows that begin anywhere, or are strided, a load is one element
    group = min(v.unit(), 16 // dtype.itemsize) if v.dense_axis == 1 else 1
    return found, min(group, reach)


class ArgmaxPlan:
    """The launches of argmax: call with ``(x, out)``, out int64. ``total``: the results of the view's rows are joined too."""

    def __init__(self, v: AxisView, device: torch.device, dtype: torch.dtype, *, total: bool = False):
        self.launches: list[Plan] = []
        self.partials: list[int] = []
        gather = False
        while True:
            t, group = argmax_tiling(v, device, dtype, PARTIALS if gather else FIRST)
            rest = kernels.partial_view(v.M, t.parts(v), v.K, total=total)
            last = rest.N == 1
            scalars = (v.M, v.N, v.K, t.parts(v), v.m, v.n, v.k, v.N if total else 0)
            constants = {"LAST": last, "GATHER": gather, "GROUP": group, **t.constants(v)}
            self.launches.append(Plan(argmax_tiles, t.grid(v), scalars, constants, t.num_warps))
            if last:
                return
            self.partials.append(rest.elements)
            v, dtype, gather, total = rest, torch.float32, True, False

    def __call__(self, x: Tensor, out: Tensor) -> None:
        source, indices = x, out
        for size, launch in zip(self.partials, self.launches, strict=False):
            value = torch.empty(size, dtype=torch.float32, device=x.device)
            found = torch.empty(size, dtype=torch.int64, device=x.device)
            launch(source, indices, value, found)
            source, indices = value, found
        self.launches[-1](source, indices, source, out)
