"""GroupNorm forward where channels are adjacent in memory and those of a group fill no sector of 32 bytes: a program that took
one group would move each sector for several. Three launches instead: statistics of each channel of a part of the space,
statistics of groups, the result. x is read twice, the parts in reverse the second time, so that the last come from L2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import bucket
from weft.operators.launch import INTERPRETING, Plan, multiprocessors
from weft.operators.normalization.kernels import read, reciprocal_root, write


@triton.jit
def position_of(program, S, C, PARTS, CHANNELS: tl.constexpr, SPACE: tl.constexpr, WALK: tl.constexpr):
    """Of a program: its batch entry, part, first element of space and channels. Programs of a part are neighbours."""
    blocks = tl.cdiv(C, CHANNELS)
    part = program // blocks
    c = (program % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    return (part // PARTS).to(tl.int64), part % PARTS, (part % PARTS).to(tl.int64) * (SPACE * WALK), c


@triton.jit
def channel_statistics(
    x_ptr, means_ptr, squares_ptr, S, C, PARTS, x_b, x_s,
    CHANNELS: tl.constexpr, SPACE: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """Of each channel of a part, WALK tiles [SPACE, CHANNELS]: its mean and its sum of squares about that, fp32 [B, PARTS, C].
    Sums are of differences from the mean of the first tile, of which nothing cancels."""
    b, part, first, c = position_of(tl.program_id(0), S, C, PARTS, CHANNELS, SPACE, WALK)
    s = first + tl.arange(0, SPACE)
    x_ptr += b * x_b + c[None, :]
    x = read(x_ptr + s[:, None] * x_s, (s < S)[:, None] & (c < C)[None, :])
    around = tl.sum(x, axis=0) / tl.minimum(S - first, SPACE)
    total = tl.zeros([SPACE, CHANNELS], tl.float32)
    squares = tl.zeros([SPACE, CHANNELS], tl.float32)
    for i in range(0, WALK):
        inside = (s + i * SPACE < S)[:, None] & (c < C)[None, :]
        x = tl.where(inside, read(x_ptr + (s + i * SPACE)[:, None] * x_s, inside) - around[None, :], 0.0)
        total += x
        squares += x * x
    n = tl.minimum(S - first, SPACE * WALK).to(tl.float32)
    off = tl.sum(total, axis=0)
    at = (b * PARTS + part) * C + c
    tl.store(means_ptr + at, around + off / n, mask=c < C)
    squares = tl.maximum(tl.sum(squares, axis=0) - off * (off / n), 0.0, tl.PropagateNan.ALL)
    tl.store(squares_ptr + at, squares, mask=c < C)


@triton.jit
def group_statistics(
    means_ptr, squares_ptr, mean_ptr, rstd_ptr, S, C, G, PARTS, n, eps,
    CHANNELS: tl.constexpr, MOST: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of a group, from those of its channels' parts of SPAN elements (Chan, Golub & LeVeque 1979): fp32 [B, G] both."""
    row = tl.program_id(0)
    part = tl.arange(0, MOST)[:, None]
    c = tl.arange(0, CHANNELS)[None, :]
    inside = (part < PARTS) & (c < C // G)
    at = ((row // G).to(tl.int64) * PARTS + part) * C + row % G * (C // G) + c
    means = tl.load(means_ptr + at, mask=inside, other=0.0)
    squares = tl.load(squares_ptr + at, mask=inside, other=0.0)
    size = tl.where(inside, tl.minimum(S - part * SPAN, SPAN), 0).to(tl.float32)
    near = tl.sum(tl.sum(tl.where((part == 0) & (c == 0), means, 0.0), axis=1), axis=0)
    mean = near + tl.sum(tl.sum(size * (means - near), axis=1), axis=0) / n
    off = means - mean
    rstd = reciprocal_root(tl.sum(tl.sum(squares + size * off * off, axis=1), axis=0) / n, eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def normalised_channels(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, S, C, G, PARTS, x_b, x_s, y_b, y_s, w_c, b_c,
    CHANNELS: tl.constexpr, SPACE: tl.constexpr, WALK: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) * rstd * w + b, the last part first."""
    b, _, first, c = position_of(tl.num_programs(0) - 1 - tl.program_id(0), S, C, PARTS, CHANNELS, SPACE, WALK)
    there = c < C
    row = b * G + c // (C // G)
    mean = tl.load(mean_ptr + row, mask=there, other=0.0)[None, :]
    scale = tl.load(rstd_ptr + row, mask=there, other=0.0)[None, :]
    if WEIGHTED:
        scale *= read(w_ptr + c * w_c, there)[None, :]
    if BIASED:
        level = read(b_ptr + c * b_c, there)[None, :]
    for i in range(0, WALK):
        s = first + i * SPACE + tl.arange(0, SPACE)
        inside = (s < S)[:, None] & there[None, :]
        y = (read(x_ptr + b * x_b + s[:, None] * x_s + c[None, :], inside) - mean) * scale
        if BIASED:
            y += level
        write(y_ptr + b * y_b + s[:, None] * y_s + c[None, :], y, inside)


def launch(c: Any) -> Any:
    """Of a ``GroupNormCall`` (dispatch.py)."""
    v, y = c.views
    channels = min(bucket(v.C), 128 // c.x.element_size())
    space = 8 if INTERPRETING else 4096 // channels
    blocks, tiles = triton.cdiv(v.C, channels), triton.cdiv(v.S, space)
    programs = 16 * multiprocessors(c.x.device)
    walk = max(bucket(triton.cdiv(v.B * blocks * tiles, programs)), bucket(triton.cdiv(tiles, 256)))
    parts = triton.cdiv(tiles, walk)
    tile = {"CHANNELS": channels, "SPACE": space, "WALK": walk}
    grid, sizes = (v.B * parts * blocks,), (v.S, v.C)
    of_channels = Plan(channel_statistics, grid, (*sizes, parts, v.b, v.s), tile, 8)
    most = {"CHANNELS": bucket(v.C // c.groups), "MOST": bucket(parts), "SPAN": space * walk}
    warps = min(max(most["CHANNELS"] * most["MOST"] // 256, 1), 8)
    of_groups = Plan(group_statistics, (v.B * c.groups,), (*sizes, c.groups, parts, float(c.n), c.eps), most, warps)
    flags = {"WEIGHTED": c.weight is not None, "BIASED": c.bias is not None}
    strides = (v.b, v.s, y.b, y.s, *(0 if t is None else t.stride(0) for t in (c.weight, c.bias)))
    result = Plan(normalised_channels, grid, (*sizes, c.groups, parts, *strides), {**tile, **flags}, 8)

    def launched(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, mean: Tensor, rstd: Tensor) -> None:
        partial = torch.empty((2, v.B, parts, v.C), dtype=torch.float32, device=x.device).unbind(0)
        if not c.saved:
            mean, rstd = torch.empty((2, v.B * c.groups), dtype=torch.float32, device=x.device).unbind(0)
        of_channels(x, *partial)
        of_groups(*partial, mean, rstd)
        result(x, weight, bias, y, mean, rstd)

    return launched
