"""The launch of ``weight_only_hopper.cu``: products of up to 64 rows with a weight of codes, fed by TMA and computed by wgmma
(sm_90 and no other).

A block is DOWN x ALONG warpgroups and a warp that fetches: 64 * DOWN rows of the weight, of whose units along K each of
ALONG warpgroups takes every ALONGth; the BLOCKS blocks of a cluster share out K. A unit is LINES times 128 bytes of each row;
STAGES of them are in flight or being read.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.hopper.tensor_maps import Maps, map_why_not
from weft.operators.launch import multiprocessors, starts_early, target_sm
from weft.operators.low_precision.quantized_weight import BITS, SLICE, QuantizedWeight, block

SOURCE = Path(__file__).with_suffix(".cu")
MOST_TOKENS = 64
ROWS, LINE = 64, 128  # of the weight that a warpgroup takes; bytes of a box's row
SHARED = 232448  # bytes of a block's shared memory
# Bytes that a multiprocessor reads while a cluster's blocks exchange their sums, about 0.7 us.
EXCHANGE = 24 * 1024
# Bytes of the weight behind the unit that is read: latency (about 1 us) times a multiprocessor's share of bandwidth, thrice.
FLYING = 96 * 1024
X_COST = 0.5  # of a byte of x, which L2 has, against one of the weight
BLOCK_X = 2**31 - 1  # blocks of a grid


class Shape(ctypes.Structure):
    """``Shape`` of weight_only_hopper.cu."""

    long = ("N", "scale_row", "scale_group", "zero_row", "zero_group", "bias_col")
    short = ("M", "groups", "units")
    _fields_ = (*((name, ctypes.c_longlong) for name in long), *((name, ctypes.c_int) for name in short))


def why_not(x: Tensor, words: Tensor) -> str:
    """Why the kernel does not take x [M, K] with a weight's words (an empty string when it does)."""
    if target_sm(x.device) != 90:
        return f"sm_{target_sm(x.device)}; wgmma and TMA as it uses them are of sm_90"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {str(x.dtype).removeprefix('torch.')}; tensor cores take float16 or bfloat16"
    m, k = x.shape
    if m > MOST_TOKENS:
        return f"{m} rows of x; sums of up to {MOST_TOKENS} stay in registers"
    if not 0 < k < 2**30:
        return f"{k} columns; it takes 1 … {2**30 - 1}"
    return map_why_not("x", x, 2, False) or map_why_not("weight", words, 4, False)


def columns_of(format: str, lines: int) -> int:
    """Of a unit."""
    return lines * block(format) // 2


def warpgroups_of(tokens: int, group: int, has_zero: bool) -> int:
    """Of a block, at most: four leave a thread 96 registers; sums of groups of 64 tokens, and short groups, want more."""
    return 2 if group and (tokens > 32 or (group < SLICE and (has_zero or tokens > 8))) else 4


def shared_bytes(config: Config, format: str, tokens: int, stages: int | None = None) -> int:
    """The ring; fp32 sums of the rows that a block adds up; barriers."""
    c, stages = config, config["STAGES"] if stages is None else stages
    boxes = columns_of(format, c["LINES"]) // 64
    stage = (c["LINES"] * c["DOWN"] * ROWS + boxes * tokens) * LINE
    return stages * stage + c["ALONG"] * c["DOWN"] * ROWS * (tokens + 2) * 4 + (2 * stages + 1) * 8


def stages_that_fit(config: Config, format: str, tokens: int) -> int:
    """As many for each warpgroup along K: it waits for every phase of its slots, or it could mistake another phase's parity
    for its own."""
    rest = shared_bytes(config, format, tokens, 0)
    fit = min(16, (SHARED - rest) // (shared_bytes(config, format, tokens, 1) - rest))
    return fit // config["ALONG"] * config["ALONG"]


def heuristic(
    sm: int, dtype: torch.dtype, format: str, group: int, has_zero: bool, tokens: int, n: int, k: int
) -> Config:
    """The fewest bytes for the multiprocessor that reads the most of them, and among equals the most warpgroups that unpack. n
    and k count thousands (1024)."""
    sms, bits = multiprocessors(torch.device("cuda")), BITS[format]

    def cost(c: Config) -> tuple[float, int]:
        rows, blocks = ROWS * c["DOWN"], c["BLOCKS"]
        # a cluster lies in one group of multiprocessors; those groups are not multiples of four (assumed: a tenth is left over)
        rounds = -(-(-(-n * 1024 // rows) * blocks) // (sms if blocks < 4 else sms * 9 // 10))
        weight, x = rows * k * 128 * bits / blocks, X_COST * tokens * k * 2048 / blocks
        late = max(1.0, FLYING / ((c["STAGES"] - 1) * rows * c["LINES"] * LINE))
        return rounds * (late * weight + x + EXCHANGE * (2 - 2 / blocks)), -c["DOWN"] * c["ALONG"]

    return min(candidates(sm, dtype, format, group, has_zero, tokens, n, k), key=cost)


def candidates(
    sm: int, dtype: torch.dtype, format: str, group: int, has_zero: bool, tokens: int, n: int, k: int
) -> Iterator[Config]:
    for c in grid_of({"DOWN": (1, 2, 4), "ALONG": (1, 2, 4), "BLOCKS": (1, 2, 4), "LINES": (2,)}):
        stages = stages_that_fit(c, format, tokens)
        parts = c["ALONG"] * c["BLOCKS"]
        if c["DOWN"] * c["ALONG"] > warpgroups_of(tokens, group, has_zero) or stages < max(2, c["ALONG"]):
            continue
        if parts == 1 or parts * columns_of(format, c["LINES"]) <= k * 1024:
            yield {**c, "STAGES": stages}


configuration = Configurations(__file__, "weight_only_hopper", heuristic, candidates)


class WeightOnlyPlan:
    """Of x, a weight and a bias. Call it with ``(x, words, scale, zero, bias, y)``: y is row-major [M, N] of x's dtype; any
    tensor is passed for zero points or a bias that are not there. Raises Declined as :func:`why_not` says."""

    def __init__(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None):
        words, scale, zero, format, group, _ = weight
        if reason := why_not(x, words):
            raise Declined(reason)
        scale_strides = scale.stride() if group else (scale.stride(0), 0)
        zero_strides = (0, 0) if zero is None else zero.stride()
        (m, k), n, tokens = x.shape, words.shape[0], bucket(x.shape[0], 8)  # what rows of x are filled up to
        c = configuration(x.device, x.dtype, format, group, zero is not None, tokens, -(-n // 1024), -(-k // 1024))
        rows = ROWS * c["DOWN"]
        grid = -(-n // rows) * c["BLOCKS"]
        if grid > BLOCK_X:
            raise Declined(f"{n} rows of the weight; a grid has {BLOCK_X} blocks of {rows}")
        flags = (bool(group), zero is not None, bias is not None)
        types = (CTYPES[x.dtype], CTYPES[scale.dtype], format.upper(), group or SLICE)
        sizes = (tokens, c["DOWN"], c["ALONG"], c["BLOCKS"], c["LINES"], c["STAGES"])
        arguments = ", ".join(map(str, (*types, *(str(flag).lower() for flag in flags), *sizes)))
        kernel, threads = f"weight_only_hopper<{arguments}>", 128 * c["DOWN"] * c["ALONG"] + 32
        self.maps = (Maps(x, False, (64, tokens)), Maps(words, False, (LINE // 4, rows)))
        self.launch = CudaPlan(SOURCE, kernel, (grid, 1), threads, (), c["BLOCKS"], shared_bytes(c, format, tokens),
                               early=starts_early(x.device))  # fmt: skip
        units = -(-k // columns_of(format, c["LINES"]))
        bias_col = 0 if bias is None else bias.stride(0)
        self.shape = Shape(n, *scale_strides, *zero_strides, bias_col, m, k // group if group else 0, units)

    def __call__(self, x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, y: Tensor) -> None:
        launch = self.launch.at(self.scalars, x, words) if y.is_cuda and y.numel() else self.launch
        launch(scale, zero, bias, y)

    def scalars(self, x: Tensor, words: Tensor) -> tuple[ctypes.Structure, ...]:
        """What the kernel is given after its pointers."""
        return self.maps[0](x), self.maps[1](words), self.shape
