"""Triton kernels of a mixture of experts: routing, weighted sums of gathered rows, and products over uneven groups of rows.

T tokens, E experts (groups), K experts of each token, R = T·K rows; each section has its other letters.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of, tiles
from weft.operators.cuda import shared_limit
from weft.operators.elementwise.kernels import logistic
from weft.operators.launch import INTERPRETING, Plan, Plans
from weft.operators.matmul.kernels import in_bands

# ---- routing ---------------------------------------------------------------------------------------------------------
#
# Top-k of each token's experts, and a counting sort of the (token, slot) pairs by expert. A token names an expert once, so a
# pair's rank within its expert is the number of earlier tokens that name it. `top_k` counts, for each block of tokens, how many
# name each expert; `prefix` turns the counts into exclusive sums over the blocks before; `scatter` adds the ranks within the
# block. Tiles are [tokens, experts]; B blocks of tokens.

TILE = 4096  # elements of a tile [tokens, experts]: 16 a thread, five such tiles in registers
GRADIENT_TILE = 1024  # 8 a thread: with 16 (and 154 registers) one program was on a multiprocessor, waiting for memory
MOST_EXPERTS = TILE


@triton.jit
def scores_of(x, SIGMOID: tl.constexpr):
    """[tokens, experts] fp32 logits, -inf where there is no expert, as probabilities."""
    if SIGMOID:
        return 1 / (1 + tl.exp(-x))
    x = tl.exp(x - tl.max(x, 1)[:, None])
    return x / tl.sum(x, 1)[:, None]


@triton.jit
def top_k(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, counts_ptr, T, E, K, row, col, bias_stride,
    TOKENS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """weights [T, K], experts [T, K] of logits [T, E], and counts [B, E] of the tokens of this block that name each
    expert."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, LANES)
    slot = tl.arange(0, SLOTS)
    inside = (t[:, None] < T) & (e[None, :] < E)
    at = logits_ptr + t.to(tl.int64)[:, None] * row + e.to(tl.int64)[None, :] * col
    x = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
    score = scores_of(x, SIGMOID)
    value = x  # scores rise with logits; equal scores of different logits are no ties
    if BIASED:
        value = score + tl.load(bias_ptr + e * bias_stride, mask=e < E, other=0.0).to(tl.float32)[None, :]
    # integers in the order of the values: -0 is 0, NaN is the largest; what is no expert, or is taken, is less than all
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = tl.where(inside, key, -0x80000000)
    weights = tl.zeros([TOKENS, SLOTS], tl.float32)
    experts = tl.zeros([TOKENS, SLOTS], tl.int32)
    for j in range(0, K):
        best = tl.argmax(key, 1)  # of equal ones the first
        taken = e[None, :] == best[:, None]
        weights = tl.where(slot[None, :] == j, tl.sum(tl.where(taken, score, 0.0), 1)[:, None], weights)
        experts = tl.where(slot[None, :] == j, best[:, None], experts)
        key = tl.where(taken, -0x80000000, key)
    if NORMALISE:
        weights = weights / tl.sum(weights, 1)[:, None]
    out = t.to(tl.int64)[:, None] * K + slot[None, :]
    there = (t[:, None] < T) & (slot[None, :] < K)
    tl.store(weights_ptr + out, weights.to(weights_ptr.dtype.element_ty), mask=there)
    tl.store(experts_ptr + out, experts, mask=there)
    named = (inside & (key == -0x80000000)).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * E + e, tl.sum(named, 0), mask=e < E)


@triton.jit
def prefix(counts_ptr, totals_ptr, B, E, ROWS: tl.constexpr, LANES: tl.constexpr):
    """counts [B, E] become the sums over the blocks before each one, totals [E] those over all."""
    e = tl.program_id(0) * LANES + tl.arange(0, LANES)
    before = tl.zeros([LANES], tl.int32)
    for start in range(0, B, ROWS):
        b = start + tl.arange(0, ROWS)
        inside = (b[:, None] < B) & (e[None, :] < E)
        at = counts_ptr + b.to(tl.int64)[:, None] * E + e[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(counts, 0) - counts + before[None, :], mask=inside)
        before += tl.sum(counts, 0)
    tl.store(totals_ptr + e, before, mask=e < E)


@triton.jit
def scatter(
    experts_ptr, before_ptr, totals_ptr, offsets_ptr, source_ptr, position_ptr, T, E, K,
    TOKENS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """offsets [E + 1]; position [T, K], where each pair goes; source [T·K], the token that each place comes from."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, LANES)
    totals = tl.load(totals_ptr + e, mask=e < E, other=0)
    ends = tl.cumsum(totals, 0)
    if tl.program_id(0) == 0:
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + e, ends, mask=e < E)
    before = tl.load(before_ptr + tl.program_id(0).to(tl.int64) * E + e, mask=e < E, other=0)
    named = tl.zeros([TOKENS, LANES], tl.int32)
    pairs = t.to(tl.int64) * K
    for j in range(0, K):
        expert = tl.load(experts_ptr + pairs + j, mask=t < T, other=-1)
        named += (e[None, :] == expert[:, None]).to(tl.int32)
    place = tl.cumsum(named, 0) - named + (ends - totals + before)[None, :]
    for j in range(0, K):
        expert = tl.load(experts_ptr + pairs + j, mask=t < T, other=-1)
        position = tl.sum(tl.where(e[None, :] == expert[:, None], place, 0), 1)
        tl.store(position_ptr + pairs + j, position, mask=t < T)
        tl.store(source_ptr + position, t, mask=t < T)


@triton.jit
def with_slot(named, dw, expert_ptr, dweight_ptr, there, e):
    """Marks the expert that a slot of each token names, and takes the gradient of its weight there."""
    expert = tl.load(expert_ptr, mask=there, other=-1)
    d = tl.load(dweight_ptr, mask=there, other=0.0).to(tl.float32)
    here = e[None, :] == expert[:, None]
    return named | here, tl.where(here, d[:, None], dw)


@triton.jit
def top_k_gradient(
    logits_ptr, experts_ptr, dweights_ptr, dlogits_ptr, T, E, K, row, col, dweights_row, dweights_col,
    TOKENS: tl.constexpr, LANES: tl.constexpr, UNROLLED: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """dlogits [T, E] of dweights [T, K]; scores are computed again.

    UNROLLED: K, where it is small: then all slots are on their way at once; else 0.
    """
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    e = tl.arange(0, LANES)
    inside = (t[:, None] < T) & (e[None, :] < E)
    at = logits_ptr + t[:, None] * row + e.to(tl.int64)[None, :] * col
    x = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
    named = tl.zeros([TOKENS, LANES], tl.int32) != 0
    dw = tl.zeros([TOKENS, LANES], tl.float32)  # of the expert that a slot names
    slots, gradients = experts_ptr + t * K, dweights_ptr + t * dweights_row
    if UNROLLED:
        for j in tl.static_range(UNROLLED):
            named, dw = with_slot(named, dw, slots + j, gradients + j * dweights_col, t < T, e)
    else:
        for j in range(0, K):
            named, dw = with_slot(named, dw, slots + j, gradients + j * dweights_col, t < T, e)
    if SIGMOID:
        score = scores_of(x, True)
        dscore = dw
        if NORMALISE:
            total = tl.sum(tl.where(named, score, 0.0), 1)[:, None]
            mean = tl.sum(tl.where(named, score * dw, 0.0), 1)[:, None] / total
            dscore = (dw - mean) / total
        dx = tl.where(named, dscore * score * (1 - score), 0.0)
    else:
        if NORMALISE:
            score = scores_of(tl.where(named, x, -float("inf")), False)  # a softmax of those that are named
        else:
            score = scores_of(x, False)
        dx = score * (dw - tl.sum(score * dw, 1)[:, None])
    tl.store(dlogits_ptr + t[:, None] * E + e[None, :], dx.to(dlogits_ptr.dtype.element_ty), mask=inside)


def token_tile(t: int, e: int, elements: int = TILE) -> dict[str, int]:
    lanes = bucket(e, 16)
    return {"TOKENS": min(bucket(t), max(1, elements // lanes), 128), "LANES": lanes}


class RoutePlan:
    """Of ``(logits, bias, weights, experts, offsets, source, position)``: three launches."""

    def __init__(self, logits: Tensor, bias: Tensor | None, k: int, normalise: bool, scoring: str):
        t, e = logits.shape
        tile = token_tile(t, e)
        blocks = triton.cdiv(t, tile["TOKENS"])
        self.blocks, self.experts = blocks, e
        scalars = (t, e, k, *logits.stride(), 0 if bias is None else bias.stride(0))
        flags = {"SIGMOID": scoring == "sigmoid", "NORMALISE": normalise, "BIASED": bias is not None}
        self.top_k = Plan(top_k, (blocks,), scalars, {**tile, "SLOTS": bucket(k), **flags}, 8)
        columns = {"ROWS": min(bucket(blocks), 128), "LANES": 16}
        self.prefix = Plan(prefix, (triton.cdiv(e, 16),), (blocks, e), columns, 4)
        self.scatter = Plan(scatter, (blocks,), (t, e, k), tile, 8)

    def __call__(self, logits: Tensor, bias: Tensor | None, weights: Tensor, experts: Tensor, *order: Tensor) -> None:
        counts = torch.empty((self.blocks + 1, self.experts), dtype=torch.int32, device=logits.device)
        before, totals = counts[:-1], counts[-1]
        self.top_k(logits, logits if bias is None else bias, weights, experts, before)
        self.prefix(before, totals)
        self.scatter(experts, before, totals, *order)


def top_k_gradient_plan(logits: Tensor, dweights: Tensor, normalise: bool, scoring: str) -> Plan:
    """Of ``(logits, experts, dweights, dlogits)``, dlogits contiguous."""
    (t, e), k = logits.shape, dweights.shape[1]
    tile = token_tile(t, e, GRADIENT_TILE)
    scalars = (t, e, k, *logits.stride(), *dweights.stride())
    flags = {"SIGMOID": scoring == "sigmoid", "NORMALISE": normalise}
    constants = {**tile, "UNROLLED": k if k <= 16 else 0, **flags}
    warps = 4 if tile["LANES"] <= GRADIENT_TILE else 8
    return Plan(top_k_gradient, (triton.cdiv(t, tile["TOKENS"]),), scalars, constants, warps)


# ---- rows back to their tokens ---------------------------------------------------------------------------------------
#
# Rows of D columns are read and written once, in whole vectors; sums are in fp32 in the order of the slots.


@triton.jit
def combine(
    y_ptr, position_ptr, weights_ptr, out_ptr, T, R, D, K, y_row, y_col, position_row, position_col, weights_row, weights_col,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """out[t, :] = Σ_j weights[t, j] · y[position[t, j], :]; NaN for a position out of range, which is never read."""
    blocks = tl.cdiv(D, BLOCK)
    t = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.range(0, K, loop_unroll_factor=4):  # several rows on their way
        row = tl.load(position_ptr + t * position_row + j * position_col, mask=t < T, other=0).to(tl.int64)
        known = (row >= 0) & (row < R)
        inside = (known & (t < T))[:, None] & (col[None, :] < D)
        y = tl.load(y_ptr + row[:, None] * y_row + col[None, :] * y_col, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + t * weights_row + j * weights_col, mask=t < T, other=0.0).to(tl.float32)
            y *= weight[:, None]
        total += tl.where(known[:, None], y, float("nan"))
    inside = (t[:, None] < T) & (col[None, :] < D)
    tl.store(out_ptr + t[:, None] * D + col[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine_gradient(
    y_ptr, position_ptr, weights_ptr, dout_ptr, dy_ptr, dweights_ptr, R, D, K,
    y_row, y_col, position_row, position_col, weights_row, weights_col, dout_row, dout_col,
    BLOCK: tl.constexpr, DOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of token t and each slot j: dy[position, :] = weight · dout[t, :] (ROWS), dweights[t, j] = dout[t, :] · y[position,
    :] (DOTS)."""
    t = tl.program_id(0).to(tl.int64)
    for j in range(0, K):
        row = tl.load(position_ptr + t * position_row + j * position_col).to(tl.int64)
        known = (row >= 0) & (row < R)
        weight = tl.load(weights_ptr + t * weights_row + j * weights_col).to(tl.float32)
        dot = tl.zeros([BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            col = start + tl.arange(0, BLOCK).to(tl.int64)
            d = tl.load(dout_ptr + t * dout_row + col * dout_col, mask=col < D, other=0.0).to(tl.float32)
            inside = known & (col < D)
            if DOTS:
                dot += d * tl.load(y_ptr + row * y_row + col * y_col, mask=inside, other=0.0).to(tl.float32)
            if ROWS:
                tl.store(dy_ptr + row * D + col, (d * weight).to(dy_ptr.dtype.element_ty), mask=inside)
        if DOTS:
            tl.store(dweights_ptr + t * K + j, tl.sum(dot, 0).to(dweights_ptr.dtype.element_ty))


def combine_heuristic(sm: int, dtype: torch.dtype, d: int) -> Config:
    """Sums in fp32, 8 a thread: four rows on their way to each."""
    block = min(d, 1024)
    return {"ROWS": max(1, min(1024 // block, 16)), "BLOCK": block, "num_warps": 4}


def combine_candidates(sm: int, dtype: torch.dtype, d: int) -> Any:
    blocks = [b for b in (256, 512, 1024, 2048, 4096) if b <= d] or [d]
    return tiles({"ROWS": (1, 2, 4, 8), "BLOCK": blocks, "num_warps": (2, 4, 8)}, 4, 32, of=("ROWS", "BLOCK"))


combine_configuration = Configurations(__file__, "combine", combine_heuristic, combine_candidates)


def combine_plan(y: Tensor, position: Tensor, *weights: Tensor) -> Plan:
    """Of ``(y, position, weights, out)``, out contiguous; without weights any tensor is passed for them."""
    (r, d), (t, k) = y.shape, position.shape
    config = combine_configuration(y.device, y.dtype, bucket(d))
    tile = {"ROWS": config["ROWS"], "BLOCK": min(config["BLOCK"], bucket(d))}
    grid = (triton.cdiv(t, tile["ROWS"]) * triton.cdiv(d, tile["BLOCK"]),)
    strides = (*y.stride(), *position.stride(), *(weights[0].stride() if weights else (0, 0)))
    return Plan(combine, grid, (t, r, d, k, *strides), {**tile, "WEIGHTED": bool(weights)}, config["num_warps"])


def combine_gradient_plan(y: Tensor, position: Tensor, weights: Tensor, dout: Tensor, rows: bool, dots: bool) -> Plan:
    """Of ``(y, position, weights, dout, dy, dweights)``, the last two contiguous; dout is passed for one that is not
    wanted."""
    (r, d), (t, k) = y.shape, position.shape
    strides = (*y.stride(), *position.stride(), *weights.stride(), *dout.stride())
    block = min(bucket(d), 4096)
    constants = {"BLOCK": block, "DOTS": dots, "ROWS": rows}
    return Plan(combine_gradient, (t,), (r, d, k, *strides), constants, 8 if block > 2048 else 4)


# ---- grouped products ------------------------------------------------------------------------------------------------
#
# y_e = x_e · w[e]ᵀ over uneven groups of rows, and the gradient of its weights, c[e] = a_eᵀ · b_e. Group e has the rows
# offsets[e] … offsets[e + 1] - 1, which only the device knows. The grid has room for any sizes: tile s belongs to the group e
# with
#
#     offsets[e] // BLOCK_M + e <= s < offsets[e + 1] // BLOCK_M + e + 1,
#
# which leaves a group at least the ⌈rows / BLOCK_M⌉ tiles that it needs, so a program finds its group by counting the offsets
# for which the left side holds, and R // BLOCK_M + E + 1 tiles (the last for rows past all groups, which become zeros) are
# enough. A tile that its group does not need ends at once.
#
# R rows in E groups, N columns of y (2·N rows of w for gate and up), K terms; T rows of x when they are gathered.


@triton.jit
def tile_of_group(offsets_ptr, tile, R, E, BLOCK_M: tl.constexpr, LANES: tl.constexpr):
    """The group of a row tile, its first row and the end of its group; group E holds the rows past all groups. Offsets are
    held to 0 … R, so wrong ones cannot reach outside of x."""
    e = tl.arange(0, LANES)
    offset = tl.load(offsets_ptr + e, mask=(e > 0) & (e <= E), other=0)
    offset = tl.minimum(tl.maximum(offset, 0), R)
    group = tl.sum(((offset // BLOCK_M + e <= tile) & (e <= E)).to(tl.int32), 0) - 1
    first = tl.sum(tl.where(e == group, offset, 0), 0)
    end = tl.where(group < E, tl.sum(tl.where(e == group + 1, offset, 0), 0), R)
    row = first + (tile - first // BLOCK_M - group) * BLOCK_M
    return group, tl.maximum(row, first), end


@triton.jit
def grouped_product(
    x_ptr, w_ptr, offsets_ptr, source_ptr, bias_ptr, y_ptr, pre_ptr, R, N, K, E, T,
    x_row, x_col, w_group, w_row, w_col, bias_group, bias_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    EVEN_K: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """y [R, N]: of row r in group e, x[r] · w[e]ᵀ + bias[e], or with GATED silu(gate) · up of the first and the last N
    rows of w[e]; GATHER takes x[source[r]] (NaN for a source that is no row of x); KEEP writes gate and up to pre [R, 2N]."""
    tile, tile_n = in_bands(tl.program_id(0), R // BLOCK_M + E + 1, tl.cdiv(N, BLOCK_N), GROUP)
    group, first, end = tile_of_group(offsets_ptr, tile, R, E, BLOCK_M, LANES)
    if first >= end:
        return
    m = first + tl.arange(0, BLOCK_M)
    row = tl.minimum(m, end - 1)  # rows past the end repeat the last and are not stored
    if GATHER:
        row = tl.load(source_ptr + row)
        known = (row >= 0) & (row < T)
        row = tl.where(known, row, 0)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = (n % N).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    group_of_w = tl.minimum(group, E - 1).to(tl.int64)
    terms = tl.where(group < E, K, 0)
    x = x_ptr + row.to(tl.int64)[:, None] * x_row + k.to(tl.int64)[None, :] * x_col  # [BLOCK_M, BLOCK_K]
    w_ptr += group_of_w * w_group
    w = w_ptr + column[None, :] * w_row + k.to(tl.int64)[:, None] * w_col  # [BLOCK_K, BLOCK_N]
    if GATED:
        up = w_ptr + (column + N)[None, :] * w_row + k.to(tl.int64)[:, None] * w_col
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, terms, BLOCK_K):
        if EVEN_K:
            x_tile, w_tile = tl.load(x), tl.load(w)
        else:
            x_tile = tl.load(x, mask=k[None, :] < K - start, other=0.0)
            w_tile = tl.load(w, mask=k[:, None] < K - start, other=0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
        if GATED:
            if EVEN_K:
                up_tile = tl.load(up)
            else:
                up_tile = tl.load(up, mask=k[:, None] < K - start, other=0.0)
            acc_up = tl.dot(x_tile, up_tile, acc_up, input_precision="ieee")
            up += BLOCK_K * w_col
        x += BLOCK_K * x_col
        w += BLOCK_K * w_col
    if BIAS:
        bias = bias_ptr + group_of_w * bias_group + column * bias_col
        acc += tl.load(bias, mask=group < E, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias + N * bias_col, mask=group < E, other=0.0).to(tl.float32)[None, :]
    if GATHER:
        acc = tl.where(known[:, None], acc, float("nan"))
        acc_up = tl.where(known[:, None], acc_up, float("nan"))
    inside = (m[:, None] < end) & (n[None, :] < N)
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    if KEEP:
        pre = pre_ptr + at + m.to(tl.int64)[:, None] * N
        tl.store(pre, acc.to(pre_ptr.dtype.element_ty), mask=inside)
        tl.store(pre + N, acc_up.to(pre_ptr.dtype.element_ty), mask=inside)
    if GATED:
        acc = acc * logistic(acc, y_ptr.dtype.element_ty == tl.float32) * acc_up
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def grouped_outer(
    a_ptr, b_ptr, offsets_ptr, order_ptr, a_source_ptr, b_source_ptr, c_ptr, R, P, Q, E, A, B,
    a_row, a_col, b_row, b_col,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr,
):  # fmt: skip
    """c [E, P, Q]: c[e] = Σ_r a[r, :]ᵀ · b[r, :] over the rows of group e, in fp32 in their order; groups run in the given
    order. A and B are how many rows a and b have; what is gathered from outside of them is left out."""
    tiles_p, tiles_q = tl.cdiv(P, BLOCK_P), tl.cdiv(Q, BLOCK_Q)
    tiles = tiles_p * tiles_q
    group = tl.load(order_ptr + tl.program_id(0) // tiles).to(tl.int64)
    tile_p, tile_q = in_bands(tl.program_id(0) % tiles, tiles_p, tiles_q, GROUP)
    first = tl.load(offsets_ptr + group, mask=group > 0, other=0)
    end = tl.minimum(tl.load(offsets_ptr + group + 1), R)
    p = tile_p * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tile_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    a_at = a_ptr + p.to(tl.int64)[:, None] * a_col
    b_at = b_ptr + q.to(tl.int64)[None, :] * b_col
    acc = tl.zeros([BLOCK_P, BLOCK_Q], tl.float32)
    for start in range(tl.maximum(first, 0), end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        inside = r < end
        a_r, b_r = r, r
        if GATHER_A:
            a_r = tl.load(a_source_ptr + r, mask=inside, other=0)
        if GATHER_B:
            b_r = tl.load(b_source_ptr + r, mask=inside, other=0)
        a_there, b_there = (a_r >= 0) & (a_r < A), (b_r >= 0) & (b_r < B)
        a_mask = (inside & a_there)[None, :] & (p[:, None] < P)
        b_mask = (inside & b_there)[:, None] & (q[None, :] < Q)
        a = tl.load(a_at + a_r.to(tl.int64)[None, :] * a_row, mask=a_mask, other=0.0)  # [BLOCK_P, BLOCK_R]
        b = tl.load(b_at + b_r.to(tl.int64)[:, None] * b_row, mask=b_mask, other=0.0)  # [BLOCK_R, BLOCK_Q]
        acc = tl.dot(a, b, acc, input_precision="ieee")
    c = c_ptr + group * P * Q + p.to(tl.int64)[:, None] * Q + q[None, :]
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(p[:, None] < P) & (q[None, :] < Q))


@triton.jit
def gated_gradient(dy_ptr, pre_ptr, dpre_ptr, R, N, dy_row, dy_col, BLOCK: tl.constexpr):
    """dpre [R, 2N] of y = silu(gate) · up, gate and up side by side in pre [R, 2N]."""
    blocks = tl.cdiv(N, BLOCK)
    r = (tl.program_id(0) // blocks).to(tl.int64)
    n = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    at = r * 2 * N + n
    dy = tl.load(dy_ptr + r * dy_row + n.to(tl.int64) * dy_col, mask=n < N, other=0.0).to(tl.float32)
    gate = tl.load(pre_ptr + at, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(pre_ptr + at + N, mask=n < N, other=0.0).to(tl.float32)
    s = logistic(gate, dpre_ptr.dtype.element_ty == tl.float32)
    tl.store(dpre_ptr + at, (dy * up * s * (1 + gate * (1 - s))).to(dpre_ptr.dtype.element_ty), mask=n < N)
    tl.store(dpre_ptr + at + N, (dy * gate * s).to(dpre_ptr.dtype.element_ty), mask=n < N)


PRODUCT, OUTER = ("BLOCK_M", "BLOCK_N", "BLOCK_K"), ("BLOCK_P", "BLOCK_Q", "BLOCK_R")


def _config(blocks: tuple[str, ...], a: int, b: int, c: int, group: int, warps: int, stages: int) -> Config:
    return {**dict(zip(blocks, (a, b, c), strict=True)), "GROUP": group, "num_warps": warps, "num_stages": stages}


def heuristic(sm: int, dtype: torch.dtype, layout: str, gated: bool, rows: int, n: int, k: int) -> Config:
    """Tiles no higher than a usual group; with a gate two accumulators share the registers."""
    if INTERPRETING:
        return _config(PRODUCT, 32, 32, 32, 2, 4, 2)
    if dtype == torch.float32:
        return _config(PRODUCT, min(rows, 64), 32 if gated else 64, 32, 8, 4, 3)
    wide, small = sm in (90, 100), sm in (86, 89, 120)
    if rows <= 64:
        return _config(PRODUCT, rows, 64 if gated else 128, 64, 8, 4, 3 if small else 4)
    if wide:
        return _config(PRODUCT, 128, 128 if gated else 256, 64, 8, 8, 3)
    return _config(PRODUCT, 128, 64 if gated else 128, 32 if small else 64, 8, 8 if gated else 4, 3)


def outer_heuristic(sm: int, dtype: torch.dtype, layout: str, rows: int, p: int, q: int) -> Config:
    if INTERPRETING:
        return _config(OUTER, 32, min(q, 32), 32, 2, 4, 2)
    if dtype == torch.float32:
        return _config(OUTER, 64, min(q, 64), 32, 8, 4, 3)
    wide = sm in (90, 100)
    return _config(OUTER, 128, min(q, 256 if wide else 128), 64 if wide else 32, 8, 8, 3)


def _fitting(sm: int, dtype: torch.dtype, blocks: tuple[str, ...], heights: tuple[int, ...], gated: bool) -> Any:
    """Tiles whose accumulators fit registers and whose stages fit shared memory."""
    limit = shared_limit(sm)
    a, b, c = blocks
    sizes = {a: heights, b: (64, 128, 256), c: (32, 64, 128)}
    for found in grid_of({**sizes, "GROUP": (4, 8), "num_warps": (4, 8), "num_stages": (3, 4)}):
        held = found[a] * found[b] * (1 + gated) // (found["num_warps"] * 32)
        shared = (found[a] + found[b] * (1 + gated)) * found[c] * dtype.itemsize * found["num_stages"]
        if 8 <= held <= 128 and shared <= limit:
            yield found


def candidates(sm: int, dtype: torch.dtype, layout: str, gated: bool, rows: int, n: int, k: int) -> Any:
    found = _fitting(sm, dtype, PRODUCT, (16, 32, 64, 128, 256), gated)
    return (c for c in found if c["BLOCK_M"] <= max(2 * rows, 16))


def outer_candidates(sm: int, dtype: torch.dtype, layout: str, rows: int, p: int, q: int) -> Any:
    return (c for c in _fitting(sm, dtype, OUTER, (64, 128, 256), False) if c["BLOCK_Q"] <= max(q, 64))


configuration = Configurations(__file__, "grouped", heuristic, candidates)
outer_configuration = Configurations(__file__, "outer", outer_heuristic, outer_candidates)


def product_plan(x: Tensor, w: Tensor, bias: Tensor | None, r: int, gather: bool, gated: bool, keep: bool) -> Plan:
    """Called with ``(x, w, offsets, source, bias, y, pre)``; any tensor is passed for an absent one. r rows, gathered or not;
    ``keep``: write gate and up to pre."""
    (t, k), e = x.shape, w.shape[0]
    n = w.shape[1] // 2 if gated else w.shape[1]
    layout = "T" if w.stride(2) == 1 else "N"
    rows = bucket(max(r // e, 1), 16)
    config = configuration(x.device, x.dtype, layout, gated, min(rows, 4096), bucket(n), bucket(k))
    tile = {name: config[name] for name in (*PRODUCT, "GROUP")}
    grid = ((r // tile["BLOCK_M"] + e + 1) * triton.cdiv(n, tile["BLOCK_N"]),)
    scalars = (r, n, k, e, t, *x.stride(), *w.stride(), *((0, 0) if bias is None else bias.stride()))
    flags = {"GATHER": gather, "BIAS": bias is not None, "GATED": gated, "KEEP": keep}
    constants = {**tile, "LANES": bucket(e + 1), "EVEN_K": k % tile["BLOCK_K"] == 0, **flags}
    return Plan(grouped_product, grid, scalars, constants, config["num_warps"], config["num_stages"])


def outer_plan(a: Tensor, b: Tensor, r: int, e: int, gather_a: bool, gather_b: bool) -> Plan:
    """Of ``(a, b, offsets, order, a_source, b_source, c)``; a is passed for a source that there is not."""
    p, q = a.shape[1], b.shape[1]
    layout = "".join("N" if t.stride(1) == 1 else "T" for t in (a, b))
    rows = bucket(max(r // e, 1), 16)
    config = outer_configuration(a.device, a.dtype, layout, min(rows, 4096), bucket(p, 16), bucket(q, 16))
    tile = {name: config[name] for name in (*OUTER, "GROUP")}
    grid = (e * triton.cdiv(p, tile["BLOCK_P"]) * triton.cdiv(q, tile["BLOCK_Q"]),)
    scalars = (r, p, q, e, a.shape[0], b.shape[0], *a.stride(), *b.stride())
    constants = {**tile, "GATHER_A": gather_a, "GATHER_B": gather_b}
    return Plan(grouped_outer, grid, scalars, constants, config["num_warps"], config["num_stages"])


@Plans
def gated_gradient_plans(dy: Tensor) -> Plan:
    """Of ``(dy, pre, dpre)``, the last two contiguous."""
    (r, n) = dy.shape
    block = min(bucket(n), 1024)
    return Plan(gated_gradient, (r * triton.cdiv(n, block),), (r, n, *dy.stride()), {"BLOCK": block}, 4)
