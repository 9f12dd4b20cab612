"""The plan of ``skinny_hopper.cu``: products of up to 64 rows with a weight of 16 bits or of codes, fed by TMA and computed by
wgmma (sm_90 and no other).

A block is DOWN x ALONG warpgroups and a warp that fetches: 64 * DOWN rows of the weight, of whose units along K each of
ALONG warpgroups takes every ALONGth; the BLOCKS blocks of a cluster share out K. A unit is LINES times 128 bytes of each row;
STAGES of them are on their way or being read.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.hopper.tensor_maps import Maps
from weft.operators.hopper.tensor_maps import why_not as map_why_not
from weft.operators.launch import Plans, multiprocessors, target_sm
from weft.operators.low_precision.quantized_weight import SLICE, block

SOURCE = Path(__file__).parent / "skinny_hopper.cu"
MOST_TOKENS = 64
ROWS, LINE = 64, 128  # of the weight that a warpgroup takes; bytes of a box's row
SHARED = 232448  # bytes of a block's shared memory
# Bytes that a multiprocessor reads while a cluster's blocks tell each other their sums, about 0.7 us.
EXCHANGE = 24 * 1024
# Bytes of the weight behind the unit that is read: latency (about 1 us) times a multiprocessor's share of bandwidth, thrice.
FLYING = 96 * 1024
X_COST = 0.5  # of a byte of x, which L2 has, against one of the weight
BLOCK_X = 2**31 - 1  # blocks of a grid


class Shape(ctypes.Structure):
    """``Shape`` of skinny_hopper.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_longlong)
            for name in ("N", "scale_row", "scale_group", "zero_row", "zero_group", "bias_col")
        ),
        *((name, ctypes.c_int) for name in ("M", "groups", "units")),
    )


def why_not(x: Tensor, weight: Tensor) -> str:
    """Why the kernel does not take x [M, K] with a weight's matrix, of x's dtype or of words (an empty string when it does)."""
    if target_sm(x.device) != 90:
        return f"sm_{target_sm(x.device)}; wgmma and TMA as it uses them are of sm_90"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {str(x.dtype).removeprefix('torch.')}; tensor cores take float16 or bfloat16"
    m, k = x.shape
    if m > MOST_TOKENS:
        return f"{m} rows of x; sums of up to {MOST_TOKENS} stay in registers"
    if not 0 < k < 2**30:
        return f"{k} columns; it takes 1 … {2**30 - 1}"
    return map_why_not("x", x, 2, False) or map_why_not("weight", weight, weight.element_size(), False)


def tokens_of(m: int) -> int:
    """What rows of x are filled up to."""
    return bucket(m, 8)


def columns_of(format: str, lines: int) -> int:
    """Of a unit."""
    return lines * (LINE // 2 if format == "wide" else block(format) // 2)


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
    """As many for each warpgroup along K: it waits for every phase of its places, or parities would deceive it."""
    rest = shared_bytes(config, format, tokens, 0)
    fit = min(16, (SHARED - rest) // (shared_bytes(config, format, tokens, 1) - rest))
    return fit // config["ALONG"] * config["ALONG"]


def fewest_stages(format: str, along: int) -> int:
    """With fewer all would wait: of 16 bits a warpgroup keeps a unit until its next, ALONG further, has come."""
    return max(2, along + (format == "wide"))


def heuristic(
    sm: int, dtype: torch.dtype, format: str, group: int, has_zero: bool, tokens: int, n: int, k: int
) -> Config:
    """The fewest bytes for the multiprocessor that reads the most of them, and among equals the most warpgroups that unpack. n
    and k count thousands (1024)."""
    sms, bits = multiprocessors(torch.device("cuda")), {"int4": 4, "wide": 16}.get(format, 8)

    def cost(c: Config) -> tuple[float, int, int]:
        rows, blocks = ROWS * c["DOWN"], c["BLOCKS"]
        # a cluster lies in one group of multiprocessors; those groups are not multiples of four (assumed: a tenth is left over)
        rounds = -(-(-(-n * 1024 // rows) * blocks) // (sms if blocks < 4 else sms * 9 // 10))
        weight, x = rows * k * 128 * bits / blocks, X_COST * tokens * k * 2048 / blocks
        late = max(1.0, FLYING / ((c["STAGES"] - 1) * rows * c["LINES"] * LINE))
        groups = c["DOWN"] * c["ALONG"] if format != "wide" else -c["ALONG"]
        return rounds * (late * weight + x + EXCHANGE * (2 - 2 / blocks)), -groups, abs(c["LINES"] - 2)

    return min(candidates(sm, dtype, format, group, has_zero, tokens, n, k), key=cost)


def candidates(
    sm: int, dtype: torch.dtype, format: str, group: int, has_zero: bool, tokens: int, n: int, k: int
) -> Iterator[Config]:
    sizes = {
        "DOWN": (1, 2, 4),
        "ALONG": (1, 2, 4),
        "BLOCKS": (1, 2, 4),
        "LINES": (1, 2, 4) if format == "wide" else (2,),
    }
    for c in grid_of(sizes):
        stages = stages_that_fit(c, format, tokens)
        parts = c["ALONG"] * c["BLOCKS"]
        if c["DOWN"] * c["ALONG"] > warpgroups_of(tokens, group, has_zero) or stages < fewest_stages(
            format, c["ALONG"]
        ):
            continue
        if parts == 1 or parts * columns_of(format, c["LINES"]) <= k * 1024:
            yield {**c, "STAGES": stages}


configuration = Configurations(__file__, "skinny_hopper", heuristic, candidates)


class SkinnyHopperPlan:
    """Call it with ``(x, weight, scale, zero, bias, y)``: y is row-major [M, N] of x's dtype; any tensor takes the place of
    scales, zero points or a bias that are not there.

    Args:
        scale_strides, zero_strides: elements from row to row and from group to group.
        bias_col: elements from one of the bias to the next; None where there is none.

    Raises:
        Declined: as :func:`why_not` says.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        format: str,
        group: int,
        scale: torch.dtype,
        scale_strides: tuple[int, int] = (0, 0),
        zero_strides: tuple[int, int] | None = None,
        bias_col: int | None = None,
    ):
        if reason := why_not(x, weight):
            raise Declined(reason)
        (m, k), n, tokens = x.shape, weight.shape[0], tokens_of(x.shape[0])
        has_zero = zero_strides is not None
        c = configuration(x.device, x.dtype, format, group, has_zero, tokens, -(-n // 1024), -(-k // 1024))
        rows = ROWS * c["DOWN"]
        grid = -(-n // rows) * c["BLOCKS"]
        if grid > BLOCK_X:
            raise Declined(f"{n} rows of the weight; a grid has {BLOCK_X} blocks of {rows}")
        flags = (bool(group), has_zero, bias_col is not None)
        kernel = ", ".join(
            [
                CTYPES[x.dtype],
                CTYPES[scale],
                format.upper(),
                str(group or SLICE),
                *(str(flag).lower() for flag in flags),
                *map(str, (tokens, c["DOWN"], c["ALONG"], c["BLOCKS"], c["LINES"], c["STAGES"])),
            ]
        )
        self.maps = (Maps(x, False, (64, tokens)), Maps(weight, False, (LINE // weight.element_size(), rows)))
        self.launch = CudaPlan(
            SOURCE,
            f"skinny_hopper<{kernel}>",
            (grid, 1),
            128 * c["DOWN"] * c["ALONG"] + 32,
            (),
            c["BLOCKS"],
            shared_bytes(c, format, tokens),
        )
        units = -(-k // columns_of(format, c["LINES"]))
        self.shape = Shape(
            n, *scale_strides, *(zero_strides or (0, 0)), bias_col or 0, m, k // group if group else 0, units
        )
        self.known: dict[tuple[int, int], CudaPlan] = {}

    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, y: Tensor) -> None:
        launch = self.launch
        if y.is_cuda and y.numel():
            key = (x.data_ptr(), weight.data_ptr())
            if (found := self.known.get(key)) is None:
                if len(self.known) >= 256:
                    self.known.clear()
                found = self.known[key] = dataclasses.replace(launch, scalars=self.scalars(x, weight))
            launch = found
        launch(scale, zero, bias, y)

    def scalars(self, x: Tensor, weight: Tensor) -> tuple[ctypes.Structure, ...]:
        """What the kernel is given after its pointers."""
        return self.maps[0](x), self.maps[1](weight), self.shape


def plan(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bias: Tensor,
    has_zero: bool, has_bias: bool, format: str, group: int,
) -> SkinnyHopperPlan:  # fmt: skip
    """Of a quantised weight: ``(x, words, scale, zero, bias, y)``."""
    by = (scale.stride(0), scale.stride(1) if group else 0)
    off = (zero.stride(0), zero.stride(1)) if has_zero else None
    return SkinnyHopperPlan(x, words, format, group, scale.dtype, by, off, bias.stride(0) if has_bias else None)


class WidePlan:
    """Call it with ``(x, w, bias, y)``; without a bias, w takes its place."""

    def __init__(self, x: Tensor, w: Tensor, bias: Tensor | None):
        self.plan = SkinnyHopperPlan(x, w, "wide", 0, x.dtype, bias_col=None if bias is None else bias.stride(0))

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor, y: Tensor) -> None:
        self.plan(x, w, w, w, bias, y)


plans, wide_plans = Plans(plan), Plans(WidePlan)
