"""Triton kernels of routing: top-k of each token's experts, and a counting sort of the (token, slot) pairs by expert.

A token names an expert once, so a pair's rank within its expert is the number of earlier tokens that name it. ``top_k``
counts, for each block of tokens, how many name each expert; ``prefix`` turns the counts into exclusive sums over the
blocks before; ``scatter`` adds the ranks within the block. Tiles are [tokens, experts]; nothing waits for the host.

Shapes: T tokens, E experts, K of them for each token, B blocks of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import bucket
from weft.operators.launch import Plan, Plans

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


# ---- plans -----------------------------------------------------------------------------------------------------------


def _tile(t: int, e: int, elements: int = TILE) -> dict[str, int]:
    lanes = bucket(e, 16)
    return {"TOKENS": min(bucket(t), max(1, elements // lanes), 128), "LANES": lanes}


class Route:
    """Of ``(logits, bias, weights, experts, offsets, source, position)``: three launches."""

    def __init__(self, logits: Tensor, bias: Tensor | None, k: int, normalise: bool, sigmoid: bool):
        t, e = logits.shape
        tile = _tile(t, e)
        blocks = triton.cdiv(t, tile["TOKENS"])
        self.blocks, self.experts = blocks, e
        scalars = (t, e, k, *logits.stride(), 0 if bias is None else bias.stride(0))
        flags = {"SIGMOID": sigmoid, "NORMALISE": normalise, "BIASED": bias is not None}
        self.top_k = Plan(top_k, (blocks,), scalars, {**tile, "SLOTS": bucket(k), **flags}, 8)
        columns = {"ROWS": min(bucket(blocks), 128), "LANES": 16}
        self.prefix = Plan(prefix, (triton.cdiv(e, 16),), (blocks, e), columns, 4)
        self.scatter = Plan(scatter, (blocks,), (t, e, k), tile, 8)

    def __call__(
        self, logits: Tensor, bias: Tensor | None, weights: Tensor, experts: Tensor, offsets: Tensor, source: Tensor,
        position: Tensor,
    ) -> None:  # fmt: skip
        counts = torch.empty((self.blocks + 1, self.experts), dtype=torch.int32, device=logits.device)
        before, totals = counts[:-1], counts[-1]
        self.top_k(logits, logits if bias is None else bias, weights, experts, before)
        self.prefix(before, totals)
        self.scatter(experts, before, totals, offsets, source, position)


def _route(logits: Tensor, *rest: object) -> Route:
    bias = rest[0] if isinstance(rest[0], Tensor) else None
    k, normalise, sigmoid = rest[-3:]
    return Route(logits, bias, k, normalise, sigmoid)  # type: ignore[arg-type]


def _gradient(logits: Tensor, dweights: Tensor, normalise: bool, sigmoid: bool) -> Plan:
    """Of ``(logits, experts, dweights, dlogits)``, dlogits contiguous."""
    (t, e), k = logits.shape, dweights.shape[1]
    tile = _tile(t, e, GRADIENT_TILE)
    scalars = (t, e, k, *logits.stride(), *dweights.stride())
    constants = {**tile, "UNROLLED": k if k <= 16 else 0, "SIGMOID": sigmoid, "NORMALISE": normalise}
    warps = 4 if tile["LANES"] <= GRADIENT_TILE else 8
    return Plan(top_k_gradient, (triton.cdiv(t, tile["TOKENS"]),), scalars, constants, warps)


plans = Plans(_route)
gradient_plans = Plans(_gradient)
