"""The one kernel of the rotary embedding, forward and backward, and its plans."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.launch import Plan, Plans

# B batch, S sequence, H heads of q, G heads of k, D head dim, R rotated columns; q [B, S, H, D], k [B, S, G, D]


@triton.jit
def heads_of(block, heads, HEADS: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr):
    """This program's HEADS heads, int64 [PASSES, ROWS, 1], and which of the places hold one."""
    place = tl.arange(0, PASSES)[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]
    head = block * HEADS + place
    return head.to(tl.int64), (place < HEADS) & (head < heads)


@triton.jit
def read_heads(
    ptr, head, there, head_stride, col_stride,
    HALF: tl.constexpr, COLS: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first and the second element of every pair, [PASSES, ROWS, COLS] each, as they lie in memory."""
    if INTERLEAVED:
        col = tl.arange(0, 2 * COLS)[None, None, :]
        at = ptr + head * head_stride + col * col_stride
        x = tl.load(at, mask=there & (col < 2 * HALF), eviction_policy="evict_last")
        first, second = tl.split(tl.reshape(x, [PASSES, ROWS, COLS, 2]))
    else:
        col = tl.arange(0, COLS)[None, None, :]
        at = ptr + head * head_stride + col * col_stride
        first = tl.load(at, mask=there & (col < HALF), eviction_policy="evict_last")
        second = tl.load(at + HALF * col_stride, mask=there & (col < HALF), eviction_policy="evict_last")
    return first, second


@triton.jit
def write_rotated(
    ptr, head, there, head_stride, col_stride, first, second, cos, sin,
    HALF: tl.constexpr, COLS: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """(first cos - second sin, second cos + first sin), in fp32 and rounded once."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    one = (first * cos - second * sin).to(ptr.dtype.element_ty)
    other = (second * cos + first * sin).to(ptr.dtype.element_ty)
    if INTERLEAVED:
        col = tl.arange(0, 2 * COLS)[None, None, :]
        y = tl.reshape(tl.join(one, other), [PASSES, ROWS, 2 * COLS])
        tl.store(ptr + head * head_stride + col * col_stride, y, mask=there & (col < 2 * HALF))
    else:
        col = tl.arange(0, COLS)[None, None, :]
        at = ptr + head * head_stride + col * col_stride
        tl.store(at, one, mask=there & (col < HALF))
        tl.store(at + HALF * col_stride, other, mask=there & (col < HALF))


@triton.jit
def rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, S, H, G, blocks,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
    qo_b, qo_s, qo_h, qo_d, ko_b, ko_s, ko_h, ko_d,
    HALF: tl.constexpr, COLS: tl.constexpr, REST: tl.constexpr, REST_COLS: tl.constexpr, ROWS: tl.constexpr,
    Q_HEADS: tl.constexpr, Q_PASSES: tl.constexpr, K_HEADS: tl.constexpr, K_PASSES: tl.constexpr,
    INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
):  # fmt: skip
    """A program rotates Q_HEADS heads of q and K_HEADS of k of one token.

    ROWS heads are what its threads take at once with 16 bytes each, so a thread has the same columns in every pass: it reads
    its cosines and sines, [1, ROWS, COLS], once for all heads and passes them to nobody. HALF is R / 2 and COLS a power of two
    of at least that; REST columns behind them are copied (0 in place). CONJUGATE turns by the negative angle: the gradient.
    All loads come before the first store, which they could not pass.
    """
    token, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, s = (token // S).to(tl.int64), (token % S).to(tl.int64)
    q_head, q_there = heads_of(block, H, Q_HEADS, Q_PASSES, ROWS)
    k_head, k_there = heads_of(block, G, K_HEADS, K_PASSES, ROWS)
    q_ptr += b * q_b + s * q_s
    k_ptr += b * k_b + s * k_s
    q_out_ptr += b * qo_b + s * qo_s
    k_out_ptr += b * ko_b + s * ko_s
    col = tl.arange(0, COLS)[None, None, :] + tl.zeros([1, ROWS, 1], tl.int32)
    cos = tl.load(cos_ptr + b * cos_b + s * cos_s + col * cos_d, mask=col < HALF, eviction_policy="evict_last")
    sin = tl.load(sin_ptr + b * sin_b + s * sin_s + col * sin_d, mask=col < HALF, eviction_policy="evict_last")
    q1, q2 = read_heads(q_ptr, q_head, q_there, q_h, q_d, HALF, COLS, Q_PASSES, ROWS, INTERLEAVED)
    k1, k2 = read_heads(k_ptr, k_head, k_there, k_h, k_d, HALF, COLS, K_PASSES, ROWS, INTERLEAVED)
    if REST > 0:
        rest = tl.arange(0, REST_COLS)[None, None, :]
        at = rest + 2 * HALF
        q_rest = tl.load(q_ptr + q_head * q_h + at * q_d, mask=q_there & (rest < REST), eviction_policy="evict_last")
        k_rest = tl.load(k_ptr + k_head * k_h + at * k_d, mask=k_there & (rest < REST), eviction_policy="evict_last")
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if CONJUGATE:
        sin = -sin
    write_rotated(q_out_ptr, q_head, q_there, qo_h, qo_d, q1, q2, cos, sin, HALF, COLS, Q_PASSES, ROWS, INTERLEAVED)
    write_rotated(k_out_ptr, k_head, k_there, ko_h, ko_d, k1, k2, cos, sin, HALF, COLS, K_PASSES, ROWS, INTERLEAVED)
    if REST > 0:
        tl.store(q_out_ptr + q_head * qo_h + at * qo_d, q_rest, mask=q_there & (rest < REST))
        tl.store(k_out_ptr + k_head * ko_h + at * ko_d, k_rest, mask=k_there & (rest < REST))


# ---- plans -----------------------------------------------------------------------------------------------------------


def heuristic(sm: int, dtype: torch.dtype, d: int, interleaved: bool) -> Config:
    """About 4096 elements of q a program, eight 16-byte vectors a thread."""
    heads = max(4096 // d, 1)
    return {"HEADS": heads, "num_warps": min(max(heads * d * dtype.itemsize // 4096, 1), 8)}


def candidates(sm: int, dtype: torch.dtype, d: int, interleaved: bool) -> Any:
    every = grid_of({"HEADS": (2, 4, 8, 16, 32, 64), "num_warps": (1, 2, 4, 8)})
    return [c for c in every if 1 <= c["HEADS"] * d * dtype.itemsize // (512 * c["num_warps"]) <= 16]


configurations = Configurations(__file__, "rotary", heuristic, candidates)


def table_strides(table: Tensor) -> tuple[int, int, int]:
    """Of cosines or sines [S, R/2] or [B, S, R/2]: from batch to batch, token to token, column to column."""
    return (0, *table.stride()) if table.ndim == 2 else table.stride()  # type: ignore[return-value]


def plan(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool, inplace: bool) -> Plan:
    """Of ``(q, k, cos, sin, q result, k result)``, the results as ``torch.empty_like`` makes them, or q and k."""
    (b, s, h, d), g, half = q.shape, k.shape[2], cos.shape[-1]
    results = (q, k) if inplace else (torch.empty_like(t, device="meta") for t in (q, k))
    config = configurations(q.device, q.dtype, bucket(d), interleaved)
    blocks = max(triton.cdiv(h, config["HEADS"]), triton.cdiv(g, config["HEADS"]))
    rest = 0 if inplace else d - 2 * half
    q_heads, k_heads = triton.cdiv(h, blocks), triton.cdiv(g, blocks)
    row = bucket(half) * (2 if interleaved else 1)  # elements of one load
    rows = max(config["num_warps"] * 32 * (16 // q.element_size()) // row, 1)
    constants = {
        "HALF": half,
        "COLS": bucket(half),
        "REST": rest,
        "REST_COLS": bucket(rest),
        "ROWS": rows,
        "Q_HEADS": q_heads,
        "Q_PASSES": bucket(triton.cdiv(q_heads, rows)),
        "K_HEADS": k_heads,
        "K_PASSES": bucket(triton.cdiv(k_heads, rows)),
        "INTERLEAVED": interleaved,
        "CONJUGATE": conjugate,
    }
    strides = [*q.stride(), *k.stride(), *table_strides(cos), *table_strides(sin)]
    for result in results:
        strides += result.stride()
    return Plan(rotate, (b * s * blocks,), (s, h, g, blocks, *strides), constants, config["num_warps"])


plans = Plans(plan)
