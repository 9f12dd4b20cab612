"""The one Triton kernel of the rotary embedding, forward and backward, and its launch."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.cuda import pointer_aligned
from weft.operators.launch import INTERPRETING, Plan

# B batch, S sequence, H heads of q, G heads of k, D head dim, R rotated columns; q [B, S, H, D], k [B, S, G, D]


@triton.jit
def row_numbers(PASSES: tl.constexpr, ROWS: tl.constexpr):
    """The number of each row of a tile, [PASSES, ROWS, 1]: row p is head p // TOKENS of the program's, token p % TOKENS."""
    return tl.arange(0, PASSES)[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]


@triton.jit
def exists(number, block, heads, tokens, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Which rows hold a head of the program's HEADS, and a token of the ``tokens`` that are left."""
    inside = (number < HEADS * TOKENS) & (block * HEADS + number // TOKENS < heads)
    if TOKENS > 1:
        inside &= number % TOKENS < tokens
    return inside


@triton.jit
def offsets(number, block, head_stride, token_stride, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Offset of each row's columns, int64, from the program's first token."""
    at = (block * HEADS + number // TOKENS).to(tl.int64) * head_stride
    if TOKENS > 1:
        at += (number % TOKENS).to(tl.int64) * token_stride
    return at


@triton.jit
def read_columns(
    ptr, inside, col_stride, N: tl.constexpr, COLS: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """N columns of each row, [PASSES, ROWS, COLS]. SPREAD: every other element of memory is a column, and all of them are
    read, as vectors."""
    if SPREAD:
        col = tl.arange(0, 2 * COLS)[None, None, :]
        x = tl.load(ptr + col, mask=inside & (col < 2 * N), eviction_policy="evict_last")
        x, _ = tl.split(tl.reshape(x, [PASSES, ROWS, COLS, 2]))
    else:
        col = tl.arange(0, COLS)[None, None, :]
        x = tl.load(ptr + col * col_stride, mask=inside & (col < N), eviction_policy="evict_last")
    return x


@triton.jit
def read_rotated(
    ptr, inside, col_stride, HALF: tl.constexpr, COLS: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The first and the second element of every pair, [PASSES, ROWS, COLS] each, as they lie in memory."""
    if INTERLEAVED:
        x = read_columns(ptr, inside, col_stride, 2 * HALF, 2 * COLS, PASSES, ROWS, SPREAD)
        first, second = tl.split(tl.reshape(x, [PASSES, ROWS, COLS, 2]))
    else:
        first = read_columns(ptr, inside, col_stride, HALF, COLS, PASSES, ROWS, SPREAD)
        second = read_columns(ptr + HALF * col_stride, inside, col_stride, HALF, COLS, PASSES, ROWS, SPREAD)
    return first, second


@triton.jit
def write_rotated(
    ptr, inside, col_stride, first, second, cos, sin,
    HALF: tl.constexpr, COLS: tl.constexpr, PASSES: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """(first cos - second sin, second cos + first sin), in fp32 and rounded once."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    one = (first * cos - second * sin).to(ptr.dtype.element_ty)
    other = (second * cos + first * sin).to(ptr.dtype.element_ty)
    if INTERLEAVED:
        col = tl.arange(0, 2 * COLS)[None, None, :]
        y = tl.reshape(tl.join(one, other), [PASSES, ROWS, 2 * COLS])
        tl.store(ptr + col * col_stride, y, mask=inside & (col < 2 * HALF))
    else:
        col = tl.arange(0, COLS)[None, None, :]
        at = ptr + col * col_stride
        tl.store(at, one, mask=inside & (col < HALF))
        tl.store(at + HALF * col_stride, other, mask=inside & (col < HALF))


@triton.jit
def part_of(program, S, blocks, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """The program's batch (int64), first token and block of heads. Of one token after the other, the next program takes other
    heads; of several, it takes the tokens behind them, and other heads come after CHUNK times TOKENS tokens: programs that run
    together then read stretches of memory, and find their cosines in L2."""
    groups = tl.cdiv(S, TOKENS)
    if TOKENS > 1:
        b, rest = program // (groups * blocks), program % (groups * blocks)
        begin = rest // (CHUNK * blocks) * CHUNK
        rest %= CHUNK * blocks
        span = tl.minimum(groups - begin, CHUNK)  # the last chunk is shorter
        group, block = begin + rest % span, rest // span
    else:
        token, block = program // blocks, program % blocks
        b, group = token // S, token % S
    return b.to(tl.int64), group * TOKENS, block


@triton.jit
def rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, S, H, G, blocks,
    q_b, q_s, q_h, q_d, k_b, k_s, k_h, k_d, cos_b, cos_s, cos_d, sin_b, sin_s, sin_d,
    qo_b, qo_s, qo_h, qo_d, ko_b, ko_s, ko_h, ko_d,
    HALF: tl.constexpr, COLS: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    Q_HEADS: tl.constexpr, Q_PASSES: tl.constexpr, K_HEADS: tl.constexpr, K_PASSES: tl.constexpr,
    REST: tl.constexpr, REST_COLS: tl.constexpr, REST_ROWS: tl.constexpr,
    Q_REST_PASSES: tl.constexpr, K_REST_PASSES: tl.constexpr,
    INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """A program rotates Q_HEADS heads of q and K_HEADS of k of TOKENS tokens.

    ROWS heads are what its threads take at once with 16 bytes each, so a thread has the same columns and token in every pass:
    it reads its cosines and sines, [1, ROWS, COLS], once for all heads and shares them with no other thread. HALF is R / 2
    and COLS a power of two of at least that; REST columns after them are copied (0 in place), REST_ROWS heads at once.
    CONJUGATE rotates by the negative angle: the gradient. All loads come before the first store, which they could not pass.
    """
    b, first, block = part_of(tl.program_id(0), S, blocks, TOKENS, CHUNK)
    s, tokens = first.to(tl.int64), S - first
    q_ptr += b * q_b + s * q_s
    k_ptr += b * k_b + s * k_s
    q_out_ptr += b * qo_b + s * qo_s
    k_out_ptr += b * ko_b + s * ko_s
    row = tl.arange(0, ROWS)[None, :, None]
    col = tl.arange(0, COLS)[None, None, :] + tl.zeros([1, ROWS, 1], tl.int32)
    known = col < HALF
    cos_ptr += b * cos_b + s * cos_s
    sin_ptr += b * sin_b + s * sin_s
    if TOKENS > 1:
        known &= row % TOKENS < tokens
        cos_ptr += (row % TOKENS).to(tl.int64) * cos_s
        sin_ptr += (row % TOKENS).to(tl.int64) * sin_s
    cos = tl.load(cos_ptr + col * cos_d, mask=known, eviction_policy="evict_last")
    sin = tl.load(sin_ptr + col * sin_d, mask=known, eviction_policy="evict_last")
    q, k = row_numbers(Q_PASSES, ROWS), row_numbers(K_PASSES, ROWS)
    q_inside = exists(q, block, H, tokens, Q_HEADS, TOKENS)
    k_inside = exists(k, block, G, tokens, K_HEADS, TOKENS)
    q_at = q_ptr + offsets(q, block, q_h, q_s, Q_HEADS, TOKENS)
    k_at = k_ptr + offsets(k, block, k_h, k_s, K_HEADS, TOKENS)
    q1, q2 = read_rotated(q_at, q_inside, q_d, HALF, COLS, Q_PASSES, ROWS, INTERLEAVED, SPREAD)
    k1, k2 = read_rotated(k_at, k_inside, k_d, HALF, COLS, K_PASSES, ROWS, INTERLEAVED, SPREAD)
    if REST > 0:
        rest = tl.arange(0, REST_COLS)[None, None, :]
        q_number, k_number = row_numbers(Q_REST_PASSES, REST_ROWS), row_numbers(K_REST_PASSES, REST_ROWS)
        q_copied = exists(q_number, block, H, tokens, Q_HEADS, TOKENS) & (rest < REST)
        k_copied = exists(k_number, block, G, tokens, K_HEADS, TOKENS) & (rest < REST)
        q_at = q_ptr + offsets(q_number, block, q_h, q_s, Q_HEADS, TOKENS) + (rest + 2 * HALF) * q_d
        k_at = k_ptr + offsets(k_number, block, k_h, k_s, K_HEADS, TOKENS) + (rest + 2 * HALF) * k_d
        q_rest = tl.load(q_at, mask=q_copied, eviction_policy="evict_last")
        k_rest = tl.load(k_at, mask=k_copied, eviction_policy="evict_last")
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if CONJUGATE:
        sin = -sin
    q_at = q_out_ptr + offsets(q, block, qo_h, qo_s, Q_HEADS, TOKENS)
    k_at = k_out_ptr + offsets(k, block, ko_h, ko_s, K_HEADS, TOKENS)
    write_rotated(q_at, q_inside, qo_d, q1, q2, cos, sin, HALF, COLS, Q_PASSES, ROWS, INTERLEAVED)
    write_rotated(k_at, k_inside, ko_d, k1, k2, cos, sin, HALF, COLS, K_PASSES, ROWS, INTERLEAVED)
    if REST > 0:
        q_at = q_out_ptr + offsets(q_number, block, qo_h, qo_s, Q_HEADS, TOKENS) + (rest + 2 * HALF) * qo_d
        k_at = k_out_ptr + offsets(k_number, block, ko_h, ko_s, K_HEADS, TOKENS) + (rest + 2 * HALF) * ko_d
        tl.store(q_at, q_rest, mask=q_copied)
        tl.store(k_at, k_rest, mask=k_copied)


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


def every_other(x: Tensor, columns: int) -> bool:
    """Whether a head is every other element of memory, and so many columns are whole vectors of that."""
    count = 16 // x.element_size()
    *strides, column = x.stride()
    return column == 2 and 2 * columns % count == 0 and not any(s % count for s in strides) and pointer_aligned(x)


# Where tokens lie closer than heads: bytes that a program takes of a head, and tokens of some heads that come before others
RUN, CHUNK = 2048, 64 if INTERPRETING else 2048


def launch(c: Any) -> Plan:
    """Of a ``RotationCall`` (dispatch.py): ``(q, k, cos, sin, q result, k result)``, the results as ``torch.empty_like`` makes
    them, or q and k."""
    q, k = c.q, c.k
    (b, s, h, d), g, half, interleaved, inplace = q.shape, k.shape[2], c.cos.shape[-1], c.interleaved, c.inplace
    results = (q, k) if inplace else (torch.empty_like(t, device="meta") for t in (q, k))
    config = configurations(q.device, q.dtype, bucket(d), interleaved)
    row = bucket(half) * (2 if interleaved else 1)  # elements of one load
    warp = 32 * 16 // q.element_size()  # elements that a warp takes at once
    num_warps, tokens = config["num_warps"], 1
    if h > 1 and q.stride(1) < q.stride(2):  # a head's tokens lie closer than a token's heads: [B, H, S, D] in memory
        num_warps = max(num_warps // 2, 1)  # fewer threads, each with more bytes in flight
        tokens = max(min(RUN // bucket(d * q.element_size()), bucket(s), num_warps * warp // row), 1)
    heads = max(min(config["HEADS"], max(h, g)) // tokens, 1)
    blocks = max(triton.cdiv(h, heads), triton.cdiv(g, heads))
    q_heads, k_heads = triton.cdiv(h, blocks), triton.cdiv(g, blocks)
    # no more threads than the rotated columns of q's heads keep busy: of 32 columns of 128 that is a quarter
    while num_warps > 1 and num_warps * warp // row > bucket(q_heads * tokens):
        num_warps //= 2
    rows = max(num_warps * warp // row, 1)
    rest = 0 if inplace else d - 2 * half
    rest_rows = max(num_warps * warp // bucket(rest), 1)

    def passes(heads: int, rows: int) -> int:
        return bucket(triton.cdiv(heads * tokens, rows))

    sizes = {"HALF": half, "COLS": bucket(half), "TOKENS": tokens, "CHUNK": max(CHUNK // tokens, 1), "ROWS": rows}
    sizes |= {"Q_HEADS": q_heads, "Q_PASSES": passes(q_heads, rows)}
    sizes |= {"K_HEADS": k_heads, "K_PASSES": passes(k_heads, rows)}
    sizes |= {"REST": rest, "REST_COLS": bucket(rest), "REST_ROWS": rest_rows}
    sizes |= {"Q_REST_PASSES": passes(q_heads, rest_rows), "K_REST_PASSES": passes(k_heads, rest_rows)}
    spread = all(every_other(t, half * (2 if interleaved else 1)) for t in (q, k))
    constants = {**sizes, "INTERLEAVED": interleaved, "CONJUGATE": c.conjugate, "SPREAD": spread}
    strides = [*q.stride(), *k.stride(), *table_strides(c.cos), *table_strides(c.sin)]
    for result in results:
        strides += result.stride()
    grid = (b * triton.cdiv(s, tokens) * blocks,)
    return Plan(rotate, grid, (s, h, g, blocks, *strides), constants, num_warps)
