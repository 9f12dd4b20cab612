"""The launch of ``few_rows.cu``: a linear layer of up to 16 rows of 16-bit floats (sm_80 and later), with what comes before and
behind it in a decoder in one launch: a norm, an activation, a residual.

A block is WARPS warps that share out the units of a tile (16 rows of the weight; 128 columns of each are a unit); each has
STAGES units in flight. A block runs on each multiprocessor; they take the tiles in turn.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.operators.configs import Config, Configurations, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned, shared_limit
from weft.operators.hopper import gemm
from weft.operators.launch import multiprocessors, starts_early, target_sm
from weft.operators.linear.activations import Activation

SOURCE = Path(__file__).with_suffix(".cu")
MOST_ROWS = 16  # two operands B of mma.m16n8k16
UNIT = 128  # columns
WARPS = 8


class Shape(ctypes.Structure):
    """``Shape`` of few_rows.cu."""

    long = ("w_row", "x_row", "residual_row", "bias_col")
    short = ("M", "N", "K", "units", "tiles")
    _fields_ = (
        *((name, ctypes.c_longlong) for name in long), *((name, ctypes.c_int) for name in short), ("eps", ctypes.c_float),
    )  # fmt: skip


def why_not(x: Tensor, w: Tensor, norm: Tensor | None, residual: Tensor | None) -> str:
    """Why the kernel does not take x [M, K], w [N, K], norm [K] and residual [M, N] (an empty string when it does)."""
    m, k = x.shape
    if x.dtype not in gemm.SIXTEEN_BITS:
        return f"x is {str(x.dtype).removeprefix('torch.')}; tensor cores take float16 or bfloat16"
    if not 0 < m <= MOST_ROWS:
        return f"{m} rows of x; it takes 1 … {MOST_ROWS}"
    if not 0 < k < 2**30 or not len(w) < 2**30:
        return f"a weight of {len(w)} x {k}; it takes up to 2^30 rows and columns, and some columns"
    if any(k % 8 or t.stride(1) != 1 or (len(t) > 1 and t.stride(0) % 8) or not pointer_aligned(t) for t in (x, w)):
        return "rows of x or the weight that are not whole 16-byte words, or not on 16 bytes"
    if norm is not None and not (norm.is_contiguous() and pointer_aligned(norm)):
        return "a norm's weight with gaps, or not on 16 bytes"
    if residual is not None and residual.stride(1) != 1 and residual.shape[1] > 1:
        return "a residual whose rows have gaps"
    if next(candidates(target_sm(x.device), m, 0, k, norm is not None), None) is None:
        return f"{m} rows of {k} columns to be normalised; shared memory has no room for them"
    return ""


def most_rows(w: Tensor) -> int:
    """Rows of x that are one launch with a weight on a GPU: 1 where this kernel does not take it."""
    return 1 if target_sm(w.device) < 90 or why_not(w[:1], w, None, None) else MOST_ROWS


def eights(m: int) -> int:
    """Operands B that m rows of x are."""
    return -(-m // 8)


def shared_bytes(config: Config, m: int, k: int, normed: bool) -> int:
    """The ring; with a norm x, the norm's weight, both filled up to units, and sums of squares; sums of the warps, twice."""
    warps, filled = config["WARPS"], -(-k // UNIT) * UNIT
    x = (m * (filled + 32) + filled) * 2 + m * warps * 4 if normed else 0
    return warps * config["STAGES"] * (8 if normed else 8 + 4 * eights(m)) * 512 + x + 2 * warps * 16 * (m + m % 2) * 4


def heuristic(sm: int, m: int, tiles: int, k: int, normed: bool) -> Config:
    """As many stages as there is room for, but no more than a warp's units; of few units 3, which leave room for a block of the
    next kernel. An H100 took for 9728 x 896 with a norm and a gate 6.6 us with 3 stages, 7.6 with 6; for 16384 x 2048 22.6 and
    21.7."""
    found = list(candidates(sm, m, tiles, k, normed))
    units = -(-k // (UNIT * WARPS)) * -(-tiles // multiprocessors(torch.device("cuda")))
    most = min(units, 3 if normed and units <= 5 else 6)
    return next((c for c in found if c["STAGES"] >= most), found[-1])


def candidates(sm: int, m: int, tiles: int, k: int, normed: bool) -> Iterator[Config]:
    for c in grid_of({"WARPS": (WARPS,), "STAGES": (1, 2, 3, 4, 6)}):
        if shared_bytes(c, m, k, normed) <= shared_limit(sm):
            yield c


configuration = Configurations(__file__, "few_rows", heuristic, candidates)


class FewRowsPlan:
    """Call it with ``(x, w, bias, norm, residual, y)``, y [M, N] row-major; any tensor is passed for what is not there."""

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None, eps: float,
        activation: Activation,
    ):  # fmt: skip
        (m, k), gated, normed = x.shape, activation.gated, norm is not None
        n = len(w) // 2 if gated else len(w)
        tiles = -(-n // (8 if gated else 16))
        c = configuration(x.device, m, tiles, k, normed)
        there = flags(bias is not None, normed, gated), activation.on_hopper, flags(residual is not None)
        kernel = f"few_rows<{', '.join(map(str, (CTYPES[x.dtype], eights(m), *there, c['WARPS'], c['STAGES'])))}>"
        strides = w.stride(0), x.stride(0), 0 if residual is None else residual.stride(0)
        shape = Shape(*strides, 0 if bias is None else bias.stride(0), m, n, k, -(-k // UNIT), tiles, eps)
        grid, shared = min(tiles, multiprocessors(x.device)), shared_bytes(c, m, k, normed)
        self.launch = CudaPlan(SOURCE, kernel, (grid, 1), 32 * c["WARPS"], (shape,), 1, shared, starts_early(x.device))

    def __call__(self, *tensors: Tensor) -> None:
        self.launch(*tensors)
