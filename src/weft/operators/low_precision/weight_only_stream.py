"""The launch of ``weight_only_stream.cu``: products of up to 8 rows with a weight of codes, each warp a stream of its own
(sm_80 and later), with what comes before and behind them in a decoder: a norm, a gated activation, a residual.

A block is WARPS warps that share out the units of a tile (16 rows of the weight; 256 bytes of each are a unit); each has
STAGES units in flight. RESIDENT blocks run on a multiprocessor and take the tiles in turn.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.operators.configs import Config, Configurations, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned, shared_limit
from weft.operators.launch import multiprocessors, starts_early, target_sm
from weft.operators.low_precision.quantized_weight import SLICE, QuantizedWeight, block

SOURCE = Path(__file__).with_suffix(".cu")
MOST_TOKENS = 8  # columns of an operand B of mma.m16n8k16
UNIT = 4096  # bytes of 16 rows


class Shape(ctypes.Structure):
    """``Shape`` of weight_only_stream.cu."""

    long = (
        "N", "row_words", "x_row", "residual_row", "scale_row", "scale_group", "zero_row", "zero_group", "bias_col",
    )  # fmt: skip
    short = ("M", "K", "groups", "units", "tiles")
    _fields_ = (
        *((name, ctypes.c_longlong) for name in long), *((name, ctypes.c_int) for name in short), ("eps", ctypes.c_float),
    )  # fmt: skip


def why_not(x: Tensor, weight: QuantizedWeight, norm: Tensor | None, residual: Tensor | None) -> str:
    """Why the kernel does not take a call (an empty string when it does)."""
    m, k = x.shape
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {str(x.dtype).removeprefix('torch.')}; tensor cores take float16 or bfloat16"
    if not 0 < m <= MOST_TOKENS:
        return f"{m} rows of x; it takes 1 … {MOST_TOKENS}"
    if (
        not 0 < k < 2**30
        or k % 8
        or x.stride(1) != 1
        or (m > 1 and x.stride(0) % 8)
        or not pointer_aligned(x, weight.words)
    ):
        return "rows of x that are not whole 16-byte words, or not on 16 bytes"
    if norm is not None and not (norm.is_contiguous() and pointer_aligned(norm)):
        return "a norm's weight with gaps, or not on 16 bytes"
    if residual is not None and residual.stride(1) != 1 and residual.shape[1] > 1:
        return "a residual whose rows have gaps"
    if next(candidates(target_sm(x.device), weight.format, m, 0, k, norm is not None), None) is None:
        return f"{m} rows of {k} columns, which shared memory has no room for"
    return ""


def shared_bytes(config: Config, format: str, m: int, k: int, normed: bool) -> int:
    """The ring; x and the norm's weight, filled up to units; sums of the warps, twice; sums of squares."""
    warps = config["WARPS"]
    filled = -(-k // block(format)) * block(format)
    x = (m * (filled + 32) + filled * normed) * 2
    return warps * config["STAGES"] * UNIT + x + 2 * warps * 16 * (m + m % 2) * 4 + m * warps * 4


def heuristic(sm: int, format: str, m: int, n: int, k: int, normed: bool) -> Config:
    """As many warps as share the units out evenly, up to 16 of them a multiprocessor, and up to 2 stages."""
    units = -(-k // block(format))
    warps = min((8, 7, 6, 5, 4), key=lambda w: (-(-units // w) * w if units >= w else 64 + w, -w))
    found = (
        c for c in candidates(sm, format, m, n, k, normed) if c["WARPS"] * c["RESIDENT"] <= 16 and c["STAGES"] <= 2
    )
    return max(found, key=lambda c: (c["WARPS"] == warps, c["RESIDENT"], c["STAGES"]))


def candidates(sm: int, format: str, m: int, n: int, k: int, normed: bool) -> Iterator[Config]:
    limit = shared_limit(sm)
    for c in grid_of({"WARPS": (8, 7, 6, 5, 4), "RESIDENT": (1, 2, 3, 4), "STAGES": (1, 2, 3, 4, 6)}):
        if shared_bytes(c, format, m, k, normed) <= min(limit, (limit + 1024) // c["RESIDENT"] - 1024):
            yield c


configuration = Configurations(__file__, "weight_only_stream", heuristic, candidates)


class StreamPlan:
    """Call it with ``(x, words, scale, zero, bias, norm, residual, y)``; any tensor is passed for what is not there."""

    def __init__(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None,
        eps: float, gated: bool,
    ):  # fmt: skip
        words, scale, zero, format, group, _ = weight
        (m, k), n, normed = x.shape, words.shape[0], norm is not None
        c = configuration(x.device, format, m, n, k, normed)
        types = (CTYPES[x.dtype], CTYPES[scale.dtype], format.upper(), group or SLICE)
        options = (bool(group), zero is not None, bias is not None, normed, gated, residual is not None)
        arguments = (*types, flags(*options), c["WARPS"], c["STAGES"], c["RESIDENT"])
        kernel = f"weight_only_stream<{', '.join(map(str, arguments))}>"
        tiles = -(-(n // 2) // 8) if gated else -(-n // 16)
        grid = min(tiles, multiprocessors(x.device) * c["RESIDENT"])
        rows = (words.shape[1], x.stride(0), 0 if residual is None else residual.stride(0))
        of_scale = scale.stride() if group else (scale.stride(0), 0)
        of_zero = (0, 0) if zero is None else zero.stride()
        sizes = (m, k, k // group if group else 0, -(-k // block(format)), tiles)
        shape = Shape(n, *rows, *of_scale, *of_zero, 0 if bias is None else bias.stride(0), *sizes, eps)
        shared, early = shared_bytes(c, format, m, k, normed), starts_early(x.device)
        self.launch = CudaPlan(SOURCE, kernel, (grid, 1), 32 * c["WARPS"], (shape,), 1, shared, early)

    def __call__(self, *tensors: Tensor) -> None:
        self.launch(*tensors)
