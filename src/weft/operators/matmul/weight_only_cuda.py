"""The plan of ``weight_only.cu``: products of up to 16 tokens with a quantised weight, unpacked in the registers that load it.

A block is of DOWN x ALONG warps: each takes 16 rows of the weight, and ALONG of them side by side share out K; so do the BLOCKS
blocks of a cluster (sm_90 and later). Blocks of many rows read x seldom, many parts of K fill the machine with few rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans, multiprocessors, target_sm
from weft.operators.matmul.quantized_weight import SLICE, block
from weft.operators.matmul.skinny_kernels import shared_limit

SOURCE = Path(__file__).parent / "weight_only.cu"
MOST_TOKENS = 16
ROWS = 16  # of the weight that a warp takes
STEP_BYTES = 256  # of a row's words
EXCHANGE = (
    24 * 1024
)  # bytes that a multiprocessor reads while a cluster's blocks tell each other their sums, about 0.7 us
PARTS_BYTES = 20 * 1024  # at most, of sums in shared memory and of what rows of x are set apart by
BLOCK_X = 2**31 - 1  # blocks of a grid


class Shape(ctypes.Structure):
    """``Shape`` of weight_only.cu."""

    _fields_ = [
        *((name, ctypes.c_longlong) for name in ("N", "x_row", "x_col", "word_row", "scale_row")),
        *((name, ctypes.c_longlong) for name in ("scale_group", "zero_row", "zero_group", "bias_col")),
        *((name, ctypes.c_int) for name in ("M", "K", "steps", "stage")),
    ]


def why_not(x: Tensor, words: Tensor) -> str:
    """Why the kernel does not take these tensors (an empty string when it does)."""
    m, k = x.shape
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x is {str(x.dtype).removeprefix('torch.')}; tensor cores take float16 or bfloat16"
    if m > MOST_TOKENS:
        return f"{m} rows of x; sums of up to {MOST_TOKENS} stay in registers"
    if not pointer_aligned(words):
        return "words that do not begin on 16 bytes"
    if k >= 2**30 or words.shape[0] >= 2**31 - 1:
        return f"a weight of {words.shape[0]} x {k}; counted in 32 bits"
    return ""


def warps_of(m: int, group: int, has_zero: bool) -> int:
    """Of a block: 16 leave a thread 128 registers; 16 tokens with scales of short groups or zero points want more."""
    return 8 if m > 8 and group and (group < SLICE or has_zero) else 16


def columns_of(format: str) -> int:
    """Of a step: 256 bytes of a row."""
    return STEP_BYTES // 2 if format == "wide" else block(format)


def heuristic(sm: int, dtype: torch.dtype, format: str, group: int, has_zero: bool, m: int, n: int, k: int) -> Config:
    """The fewest bytes for the multiprocessor that reads the most of them: of the weight, of x once for each block, and what it
    could have read while sums go through a cluster. n and k count thousands (1024)."""
    steps, sms = k * 1024 // columns_of(format), multiprocessors(torch.device("cuda"))

    def cost(c: Config) -> float:
        parts = c["ALONG"] * c["BLOCKS"]
        rounds = -(-(-(-n * 1024 // (ROWS * c["DOWN"])) * c["BLOCKS"]) // sms)
        weight = ROWS * c["DOWN"] * c["ALONG"] * -(-steps // parts) * STEP_BYTES
        return rounds * (weight + m * k * 2048 / c["BLOCKS"] + (EXCHANGE if c["BLOCKS"] > 1 else 0))

    return min(candidates(sm, dtype, format, group, has_zero, m, n, k), key=cost)


def candidates(
    sm: int, dtype: torch.dtype, format: str, group: int, has_zero: bool, m: int, n: int, k: int
) -> Iterator[Config]:
    steps, x_bytes = k * 1024 // columns_of(format), m * columns_of(format) * 2
    for warps in (16, 8)[2 - warps_of(m, group, has_zero) // 8 :]:
        for c in grid_of(
            {"DOWN": (1, 2, 4, 8, 16), "ALONG": (1, 2, 4, 8, 16), "BLOCKS": (1, 2, 4, 8) if sm >= 90 else (1,)}
        ):
            fits = c["ALONG"] * x_bytes + PARTS_BYTES <= shared_limit(sm)
            if c["DOWN"] * c["ALONG"] == warps and (c["BLOCKS"] == 1 or c["ALONG"] * c["BLOCKS"] <= steps) and fits:
                yield c


configuration = Configurations(__file__, "weight_only_cuda", heuristic, candidates)


def plan(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bias: Tensor,
    has_zero: bool, has_bias: bool, format: str, group: int,
) -> CudaPlan:  # fmt: skip
    """Of ``(x, words, scale, zero, bias, y)`` into a new row-major y [M, N] of x's dtype; any tensor takes the place of zero
    points or a bias that are not there.

    Raises:
        Declined: as :func:`why_not` says.
    """
    if reason := why_not(x, words):
        raise Declined(reason)
    n = words.shape[0]
    strides = (
        *x.stride(),
        words.stride(0),
        *_strides(scale),
        *(_strides(zero) if has_zero else (0, 0)),
        bias.stride(0),
    )
    options = (bool(group), has_zero, has_bias)
    return launch(x, n, strides, words.shape[1] // 64, scale.dtype, format, group, options)


def launch(
    x: Tensor, n: int, strides: tuple[int, ...], steps: int, scale: torch.dtype, format: str, group: int,
    options: tuple[bool, bool, bool],
) -> CudaPlan:  # fmt: skip
    """The kernel for ``n`` rows of ``steps`` steps of any format; ``strides`` are those of ``Shape``, ``options`` whether there
    are groups, zero points and a bias."""
    (m, k), tokens = x.shape, 8 if x.shape[0] <= 8 else 16
    config = configuration(x.device, x.dtype, format, group, options[1], bucket(m), -(-n // 1024), -(-k // 1024))
    down, along, blocks = config["DOWN"], config["ALONG"], config["BLOCKS"]
    rows = ROWS * down
    if -(-n // rows) * blocks > BLOCK_X:
        raise Declined(f"{n} rows of the weight; a grid has {BLOCK_X} blocks of {rows}")
    parts = 16 + along * blocks * (rows // blocks) * tokens * 4  # bytes of sums, behind a barrier
    room = (shared_limit(target_sm(x.device)) - parts) // max(m, 1) - 64  # bytes of a row of x
    stage = _stage(-(-steps // blocks), along, room // (2 * columns_of(format)))
    pitch = stage * columns_of(format) + 32
    vectors = x.stride(1) == 1 and (m == 1 or x.stride(0) % 8 == 0) and k % 8 == 0 and pointer_aligned(x)
    kernel = ", ".join(
        [
            CTYPES[x.dtype],
            CTYPES[scale],
            format.upper(),
            str(group or SLICE),
            *(str(option).lower() for option in (*options, vectors)),
            *map(str, (tokens // 8, down, along, blocks)),
        ]
    )
    return CudaPlan(
        SOURCE,
        f"weight_only<{kernel}>",
        (-(-n // rows) * blocks, 1),
        32 * down * along,
        (Shape(n, *strides, m, k, steps, stage),),
        blocks,
        parts + m * pitch * 2,
    )


def _stage(steps: int, along: int, fit: int) -> int:
    """Steps that x lies in shared memory for at a time: all if they fit, else equal shares in whole rounds of ``along``."""
    if steps <= fit:
        return max(steps, 1)
    rounds, most = -(-steps // along), max(fit // along, 1)
    return -(-rounds // -(-rounds // most)) * along


def _strides(t: Tensor) -> tuple[int, int]:
    """From row to row and from group to group."""
    return (t.stride(0), 0) if t.ndim == 1 else (t.stride(0), t.stride(1))


plans = Plans(plan)
