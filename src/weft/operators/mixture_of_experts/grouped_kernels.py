"""Triton kernels of grouped products: y_e = x_e · w[e]ᵀ over uneven groups of rows, and its weights' gradient c[e] = a_eᵀ
· b_e.

Groups are rows offsets[e] … offsets[e + 1] - 1; their sizes are known to the device alone. The grid has room for any
sizes: tile number s belongs to the group e with

    offsets[e] // BLOCK_M + e <= s < offsets[e + 1] // BLOCK_M + e + 1,

which leaves a group at least the ⌈rows / BLOCK_M⌉ tiles that it needs, so a program finds its group by counting the
offsets for which the left side holds, and R // BLOCK_M + E + 1 tiles (the last for rows past all groups, which become
zeros) are enough. A tile that its group does not need ends at once.

Shapes: R rows in E groups, N columns of y (2·N rows of w where they are gate and up), K terms; T rows of x where they are
    gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket, grid_of
from weft.operators.elementwise.curves import logistic
from weft.operators.launch import INTERPRETING, Plan, Plans


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
def in_rectangles(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Programs in rectangles of GROUP tile rows, so that those that run together share slices of both operands in L2."""
    in_group = GROUP * tiles_n
    first = program // in_group * GROUP
    height = min(tiles_m - first, GROUP)
    return first + program % in_group % height, program % in_group // height


@triton.jit
def grouped_product(
    x_ptr, w_ptr, offsets_ptr, source_ptr, bias_ptr, y_ptr, pre_ptr, R, N, K, E, T,
    x_row, x_col, w_group, w_row, w_col, bias_group, bias_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    EVEN_K: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """y [R, N]: of row r in group e, x[r] · w[e]ᵀ + bias[e], or with GATED silu(gate) · up of the first and the last N
    rows of w[e]; GATHER takes x[source[r]] (NaN for a source that is no row of x); KEEP writes gate and up to pre [R, 2N]."""
    tile, tile_n = in_rectangles(tl.program_id(0), R // BLOCK_M + E + 1, tl.cdiv(N, BLOCK_N), GROUP)
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
    tile_p, tile_q = in_rectangles(tl.program_id(0) % tiles, tiles_p, tiles_q, GROUP)
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


# ---- configurations --------------------------------------------------------------------------------------------------


def heuristic(sm: int, dtype: torch.dtype, layout: str, gated: bool, rows: int, n: int, k: int) -> Config:
    """Tiles no higher than a usual group; with a gate two accumulators share the registers."""
    if INTERPRETING:
        return _config("MNK", 32, 32, 32, 2, 4, 2)
    if dtype == torch.float32:
        return _config("MNK", min(rows, 64), 32 if gated else 64, 32, 8, 4, 3)
    wide, small = sm in (90, 100), sm in (86, 89, 120)
    if rows <= 64:
        return _config("MNK", rows, 64 if gated else 128, 64, 8, 4, 3 if small else 4)
    if wide:
        return _config("MNK", 128, 128 if gated else 256, 64, 8, 8, 3)
    return _config("MNK", 128, 64 if gated else 128, 32 if small else 64, 8, 8 if gated else 4, 3)


def outer_heuristic(sm: int, dtype: torch.dtype, layout: str, rows: int, p: int, q: int) -> Config:
    if INTERPRETING:
        return _config("PQR", 32, min(q, 32), 32, 2, 4, 2)
    if dtype == torch.float32:
        return _config("PQR", 64, min(q, 64), 32, 8, 4, 3)
    wide = sm in (90, 100)
    return _config("PQR", 128, min(q, 256 if wide else 128), 64 if wide else 32, 8, 8, 3)


def _config(letters: str, a: int, b: int, c: int, group: int, warps: int, stages: int) -> Config:
    sizes = {f"BLOCK_{letter}": size for letter, size in zip(letters, (a, b, c), strict=True)}
    return {**sizes, "GROUP": group, "num_warps": warps, "num_stages": stages}


def _fitting(sm: int, dtype: torch.dtype, letters: str, accumulators: int, gated: bool) -> Any:
    """Tiles whose accumulators fit registers and whose stages fit shared memory."""
    limit = {80: 166912, 90: 232448, 100: 232448}.get(sm, 101376)
    a, b, c = (f"BLOCK_{letter}" for letter in letters)
    sizes: dict[str, tuple[int, ...]] = {a: (64, 128, 256), b: (64, 128, 256), c: (32, 64, 128)}
    if letters == "MNK":
        sizes[a] = (16, 32, *sizes[a])
    for found in grid_of({**sizes, "GROUP": (4, 8), "num_warps": (4, 8), "num_stages": (3, 4)}):
        held = found[a] * found[b] * accumulators // (found["num_warps"] * 32)
        shared = (found[a] + found[b] * (2 if gated else 1)) * found[c] * dtype.itemsize * found["num_stages"]
        if 8 <= held <= 128 and shared <= limit:
            yield found


def candidates(sm: int, dtype: torch.dtype, layout: str, gated: bool, rows: int, n: int, k: int) -> Any:
    return (c for c in _fitting(sm, dtype, "MNK", 1 + gated, gated) if c["BLOCK_M"] <= max(2 * rows, 16))


def outer_candidates(sm: int, dtype: torch.dtype, layout: str, rows: int, p: int, q: int) -> Any:
    return (c for c in _fitting(sm, dtype, "PQR", 1, False) if c["BLOCK_Q"] <= max(q, 64))


configuration = Configurations(__file__, "grouped", heuristic, candidates)
outer_configuration = Configurations(__file__, "outer", outer_heuristic, outer_candidates)

# ---- plans -----------------------------------------------------------------------------------------------------------


def _options(config: Config, *letters: str) -> dict[str, int]:
    return {name: config[name] for name in (*(f"BLOCK_{letter}" for letter in letters), "GROUP")}


def _product(x: Tensor, w: Tensor, *rest: Any) -> Plan:
    """Of ``(x, w, offsets, source, bias, y, pre)``; x stands in for what there is not. ``rest``: bias or nothing, then
    rows, whether they are gathered, whether there is a gate, whether pre is kept."""
    bias = rest[0] if isinstance(rest[0], Tensor) else None
    r, gather, gated, keep = rest[-4:]
    (t, k), e = x.shape, w.shape[0]
    n = w.shape[1] // 2 if gated else w.shape[1]
    layout = "T" if w.stride(2) == 1 else "N"
    rows = bucket(max(r // e, 1), 16)
    config = configuration(x.device, x.dtype, layout, gated, min(rows, 4096), bucket(n), bucket(k))
    tile = _options(config, "M", "N", "K")
    grid = ((r // tile["BLOCK_M"] + e + 1) * triton.cdiv(n, tile["BLOCK_N"]),)
    scalars = (r, n, k, e, t, *x.stride(), *w.stride(), *((0, 0) if bias is None else bias.stride()))
    flags = {
        "EVEN_K": k % tile["BLOCK_K"] == 0,
        "GATHER": gather,
        "BIAS": bias is not None,
        "GATED": gated,
        "KEEP": keep,
    }
    constants = {**tile, "LANES": bucket(e + 1), **flags}
    return Plan(grouped_product, grid, scalars, constants, config["num_warps"], config["num_stages"])


def _outer(a: Tensor, b: Tensor, r: int, e: int, gather_a: bool, gather_b: bool) -> Plan:
    """Of ``(a, b, offsets, order, a_source, b_source, c)``; a stands in for a source that there is not."""
    p, q = a.shape[1], b.shape[1]
    layout = "".join("N" if t.stride(1) == 1 else "T" for t in (a, b))
    rows = bucket(max(r // e, 1), 16)
    config = outer_configuration(a.device, a.dtype, layout, min(rows, 4096), bucket(p, 16), bucket(q, 16))
    tile = _options(config, "P", "Q", "R")
    grid = (e * triton.cdiv(p, tile["BLOCK_P"]) * triton.cdiv(q, tile["BLOCK_Q"]),)
    scalars = (r, p, q, e, a.shape[0], b.shape[0], *a.stride(), *b.stride())
    constants = {**tile, "GATHER_A": gather_a, "GATHER_B": gather_b}
    return Plan(grouped_outer, grid, scalars, constants, config["num_warps"], config["num_stages"])


def _gated_gradient(dy: Tensor) -> Plan:
    """Of ``(dy, pre, dpre)``, the last two contiguous."""
    (r, n) = dy.shape
    block = min(bucket(n), 1024)
    return Plan(gated_gradient, (r * triton.cdiv(n, block),), (r, n, *dy.stride()), {"BLOCK": block}, 4)


plans = Plans(_product)
outer_plans = Plans(_outer)
gated_gradient_plans = Plans(_gated_gradient)
