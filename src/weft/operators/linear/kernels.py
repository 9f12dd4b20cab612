"""The Triton kernels of a linear layer with its epilogue, and their launches.

y [M, N] = act(x [M, K] · wᵀ + bias) + residual, w [N, K]; of a gated activation w is [2N, K] and y = act(gate) · up + residual,
gate and up being the products with its first and its last N rows. Both halves of a column meet in one program.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from weft.operators.configs import Config, Configurations, bucket, constants_of
from weft.operators.launch import INTERPRETING, Plan
from weft.operators.matmul.dispatch import default_precision
from weft.operators.matmul.kernels import large_tiles, layout_of, round_to_tf32, tile, tile_of
from weft.operators.quantization.kernels import encode


@triton.jit
def read(at, left, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at)
    else:
        return tl.load(at, mask=left, other=0.0)


@triton.jit
def products(
    x_ptr, w_ptr, bias_ptr, m, n, M, N, K, x_row, x_col, w_row, w_col, bias_step,
    GIVEN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr, FILLED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x · wᵀ + bias of a tile in fp32, and of the other half of w's rows with GATED. GIVEN: x holds that product. Rows and
    columns past the edge wrap around to valid ones."""
    k = tl.arange(0, BLOCK_K)
    row, column = (m % M).to(tl.int64), (n % N).to(tl.int64)
    x = x_ptr + row[:, None] * x_row + k.to(tl.int64)[None, :] * x_col  # [BLOCK_M, BLOCK_K]
    w = w_ptr + k.to(tl.int64)[:, None] * w_col + column[None, :] * w_row  # [BLOCK_K, BLOCK_N]
    if GATED:
        up = w_ptr + k.to(tl.int64)[:, None] * w_col + (column + N)[None, :] * w_row
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ROUNDED: tl.constexpr = PRECISION == "tf32" and x_ptr.dtype.element_ty == tl.float32
    if GIVEN:
        given = x_ptr + row[:, None] * x_row + column[None, :] * x_col
        acc = tl.load(given).to(tl.float32)
        if GATED:
            acc_up = tl.load(given + N * x_col).to(tl.float32)
    else:
        if FILLED:  # as in matmul_tiled
            tl.assume(K > 0)
        for start in range(0, K, BLOCK_K):
            left = k < K - start
            x_tile, w_tile = read(x, left[None, :], EVEN_K), read(w, left[:, None], EVEN_K)
            if ROUNDED:
                x_tile, w_tile = round_to_tf32(x_tile), round_to_tf32(w_tile)
            acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
            if GATED:
                up_tile = read(up, left[:, None], EVEN_K)
                if ROUNDED:
                    up_tile = round_to_tf32(up_tile)
                acc_up = tl.dot(x_tile, up_tile, acc_up, input_precision=PRECISION)
                up += BLOCK_K * w_col
            x += BLOCK_K * x_col
            w += BLOCK_K * w_col
    if BIAS:
        acc += tl.load(bias_ptr + column * bias_step).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias_ptr + (column + N) * bias_step).to(tl.float32)[None, :]
    return acc, acc_up


@triton.jit
def linear_tiled(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, pre_ptr, M, N, K, x_row, x_col, w_row, w_col, bias_step, r_row, r_col,
    F: tl.constexpr, GIVEN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr, EVEN_K: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M × BLOCK_N of y, rounded once. KEEP also writes what the activation F was given: pre [M, N],
    or [M, 2N] with GATED."""
    m, n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    acc, acc_up = products(
        x_ptr, w_ptr, bias_ptr, m, n, M, N, K, x_row, x_col, w_row, w_col, bias_step,
        GIVEN, GATED, BIAS, EVEN_K, FILLED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    inside = (m[:, None] < M) & (n[None, :] < N)
    row, column = m.to(tl.int64)[:, None], n.to(tl.int64)[None, :]
    if KEEP:
        pre = pre_ptr + row * (2 * N if GATED else N) + column
        tl.store(pre, acc.to(pre_ptr.dtype.element_ty), mask=inside)
        if GATED:
            tl.store(pre + N, acc_up.to(pre_ptr.dtype.element_ty), mask=inside)
    PRECISE: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    if GATED:
        acc = F(acc, acc_up, PRECISE)
    else:
        acc = F(acc, PRECISE)
    if RESIDUAL:
        acc += tl.load(residual_ptr + row * r_row + column * r_col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + column, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def linear_quantized_tiled(
    x_ptr, w_ptr, bias_ptr, scale_ptr, q_ptr, amax_ptr, M, N, K, x_row, x_col, w_row, w_col, bias_step,
    F: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, GIVEN: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, EVEN_K: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """q [M, N]: codes (as bytes) of y / scale. amax, int32 and 0 before: the bits of the largest |y|; of floats that are not
    negative they have the floats' order, and NaN counts as largest."""
    m, n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    acc, acc_up = products(
        x_ptr, w_ptr, bias_ptr, m, n, M, N, K, x_row, x_col, w_row, w_col, bias_step,
        GIVEN, GATED, BIAS, EVEN_K, FILLED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    if GATED:
        y = F(acc, acc_up, PRECISE)
    else:
        y = F(acc, PRECISE)
    inside = (m[:, None] < M) & (n[None, :] < N)
    magnitude = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr, tl.max(tl.where(inside, magnitude, 0)), sem="relaxed")
    code = encode(y * tl.div_rn(1.0, tl.load(scale_ptr)), 0, FORMAT, False, HARDWARE)
    tl.store(q_ptr + m.to(tl.int64)[:, None] * N + n[None, :], code, mask=inside)


def heuristic(sm: int, dtype: torch.dtype, layout: str, precision: str, m: int, n: int, k: int) -> Config:
    """Large tiles where there are enough of them to fill the machine; three stages, two where shared memory is 99 KiB."""
    if INTERPRETING:
        return tile(32, 64, 32, 4, 2, group=1)
    if dtype == torch.float32:
        return tile(64, 64, 32, 4, 3) if precision == "ieee" else tile(128, 128, 32, 8, 3)
    if min(m, n) <= 64:
        return tile(64, 64, 64, 4, 3)
    if m * n <= 1024 * 1024:
        return tile(64, 128, 64, 4, 3)
    if sm in (90, 100):
        return tile(128, 256, 64, 8, 3)
    return tile(128, 128, 32 if sm in (86, 89, 120) else 64, 8, 3)


# BLOCK_N and n count rows of w, of both halves
configuration = Configurations(__file__, "linear", heuristic, lambda sm, dtype, *_: large_tiles(sm, dtype))


GIVEN = tile(16, 128, 16, 4, 1)  # 2048 sums for 128 threads


def tiled_plan(kernel: Any, c: Any, given: int = 0) -> Plan:
    """The launch of ``linear_tiled`` or ``linear_quantized_tiled`` for a call; with ``given`` x is the product in fp32, [M, N],
    of a gated activation [M, 2N], of rows that begin so many elements apart."""
    x, weight, act, precision = c.matrix, c.weight, c.activation, c.precision or default_precision()
    (m, k), rows, halves = x.shape, weight.shape[0], 2 if act.gated else 1
    config = GIVEN
    if not given:
        config = configuration(
            x.device, x.dtype, layout_of(x, weight.t()), precision, bucket(m), bucket(rows), bucket(k)
        )
    n, blocks = rows // halves, {**constants_of(config), "BLOCK_N": config["BLOCK_N"] // halves}
    others, own = c.epilogue
    epilogue = {"F": act.forward, "GIVEN": given > 0, "GATED": act.gated, "BIAS": c.bias is not None, **own}
    k, of_x = (0, (given, 1)) if given else (k, x.stride())
    known = {"EVEN_K": k % blocks["BLOCK_K"] == 0, "FILLED": k > 0, "PRECISION": precision}
    grid = (triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"]),)
    scalars = (m, n, k, *of_x, *weight.stride(), 0 if c.bias is None else c.bias.stride(0), *others)
    return Plan(kernel, grid, scalars, {**epilogue, **known, **blocks}, config["num_warps"], config["num_stages"])
