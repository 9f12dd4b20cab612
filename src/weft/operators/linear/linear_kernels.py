"""The Triton kernel of a linear layer with its epilogue, and its plan.

y [M, N] = act(x [M, K] · wᵀ + bias) + residual, w [N, K]; of a gated activation w is [2N, K] and y = act(gate) · up + residual,
gate and up being the products with its first and its last N rows. Both halves of a column meet in one program.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket
from weft.operators.launch import Plan, Plans, multiprocessors
from weft.operators.linear import linear_activations
from weft.operators.matmul import descriptor_kernels, kernels
from weft.operators.matmul.descriptor_kernels import DescriptorPlan, blocks_of, left, place_of, right
from weft.operators.matmul.kernels import round_to_tf32


@triton.jit
def tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """This program's rows and columns."""
    m, n = place_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    return m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)


@triton.jit
def read(at, left, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(at)
    else:
        return tl.load(at, mask=left, other=0.0)


@triton.jit
def with_bias(acc, acc_up, bias_ptr, column, N, bias_step, GATED: tl.constexpr):
    acc += tl.load(bias_ptr + column * bias_step).to(tl.float32)[None, :]
    if GATED:
        acc_up += tl.load(bias_ptr + (column + N) * bias_step).to(tl.float32)[None, :]
    return acc, acc_up


@triton.jit
def products(
    x_ptr, w_ptr, bias_ptr, m, n, M, N, K, x_row, x_col, w_row, w_col, bias_step,
    GATED: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x · wᵀ + bias of a tile in fp32, and of the other half of w's rows with GATED. Rows and columns past the edge wrap around
    to valid ones."""
    k = tl.arange(0, BLOCK_K)
    row, column = (m % M).to(tl.int64), (n % N).to(tl.int64)
    x = x_ptr + row[:, None] * x_row + k.to(tl.int64)[None, :] * x_col  # [BLOCK_M, BLOCK_K]
    w = w_ptr + k.to(tl.int64)[:, None] * w_col + column[None, :] * w_row  # [BLOCK_K, BLOCK_N]
    if GATED:
        up = w_ptr + k.to(tl.int64)[:, None] * w_col + (column + N)[None, :] * w_row
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ROUNDED: tl.constexpr = PRECISION == "tf32" and x_ptr.dtype.element_ty == tl.float32
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
        acc, acc_up = with_bias(acc, acc_up, bias_ptr, column, N, bias_step, GATED)
    return acc, acc_up


@triton.jit
def finish(
    acc, acc_up, residual_ptr, y_ptr, pre_ptr, m, n, M, N, r_row, r_col,
    F: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """What follows the products of a tile: y, rounded once. KEEP also writes what the activation F was given: pre [M, N], or
    [M, 2N] with GATED."""
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
def linear_tiled(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, pre_ptr, M, N, K, x_row, x_col, w_row, w_col, bias_step, r_row, r_col,
    F: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    EVEN_K: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_M × BLOCK_N of y."""
    m, n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP)
    acc, acc_up = products(
        x_ptr, w_ptr, bias_ptr, m, n, M, N, K, x_row, x_col, w_row, w_col, bias_step,
        GATED, BIAS, EVEN_K, FILLED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    finish(acc, acc_up, residual_ptr, y_ptr, pre_ptr, m, n, M, N, r_row, r_col, F, GATED, RESIDUAL, KEEP)


@triton.jit
def operands(
    x_ptr, w_ptr, M, N, K, x_step, w_step, GATED: tl.constexpr, X_ACROSS: tl.constexpr, W_ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The descriptors of x and w, as matmul_descriptors has them."""
    x_blocks = blocks_of(x_ptr, M, K, x_step, X_ACROSS, BLOCK_M, BLOCK_K)
    return x_blocks, blocks_of(w_ptr, 2 * N if GATED else N, K, w_step, W_ACROSS, BLOCK_N, BLOCK_K)


@triton.jit
def products_of_blocks(
    x_blocks, w_blocks, bias_ptr, tile, M, N, K, bias_step,
    GATED: tl.constexpr, BIAS: tl.constexpr, X_ACROSS: tl.constexpr, W_ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile's rows, its columns, and as of ``products`` its products, the operands fetched by descriptors."""
    m, n = place_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        x = left(x_blocks, m, k, X_ACROSS)
        acc = tl.dot(x, right(w_blocks, n, k, W_ACROSS), acc)
        if GATED:
            acc_up = tl.dot(x, right(w_blocks, n + N, k, W_ACROSS), acc_up)
    if BIAS:
        column = ((n + tl.arange(0, BLOCK_N)) % N).to(tl.int64)
        acc, acc_up = with_bias(acc, acc_up, bias_ptr, column, N, bias_step, GATED)
    return m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N), acc, acc_up


@triton.jit
def linear_descriptors(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, pre_ptr, M, N, K, x_step, w_step, bias_step, r_row, r_col,
    F: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    X_ACROSS: tl.constexpr, W_ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As linear_tiled, the operands fetched as matmul_descriptors does; each program computes every ``num_programs``-th
    tile."""
    tl.assume(K > 0)
    x, w = operands(x_ptr, w_ptr, M, N, K, x_step, w_step, GATED, X_ACROSS, W_ACROSS, BLOCK_M, BLOCK_N, BLOCK_K)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        m, n, acc, acc_up = products_of_blocks(
            x, w, bias_ptr, tile, M, N, K, bias_step, GATED, BIAS, X_ACROSS, W_ACROSS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP
        )
        finish(acc, acc_up, residual_ptr, y_ptr, pre_ptr, m, n, M, N, r_row, r_col, F, GATED, RESIDUAL, KEEP)


# ---- plan ------------------------------------------------------------------------------------------------------------


def heuristic(sm: int, dtype: torch.dtype, layout: str, precision: str, gated: bool, m: int, n: int, k: int) -> Config:
    """That of ``matmul``, measured where it was: the loop is the same. BLOCK_N and n count rows of w, of both halves."""
    like = kernels.configuration
    key = (dtype, layout, precision, m, n, k)
    return like.table(sm).get(like.key(*key)) or kernels.heuristic(sm, *key)


def candidates(
    sm: int, dtype: torch.dtype, layout: str, precision: str, gated: bool, m: int, n: int, k: int
) -> Iterable[Config]:
    found: Iterable[Config] = kernels.candidates(sm, dtype, layout, precision, m, n, k)
    return found


configuration = Configurations(__file__, "linear", heuristic, candidates)


def heuristic_of_descriptors(sm: int, layout: str, gated: bool, m: int, n: int, k: int) -> Config:
    """That of ``matmul``'s descriptors, measured where it was."""
    like = descriptor_kernels.configuration
    key = (layout, m, n, k)
    return like.table(sm).get(like.key(*key)) or descriptor_kernels.heuristic(sm, *key)


def candidates_of_descriptors(sm: int, layout: str, gated: bool, m: int, n: int, k: int) -> Iterable[Config]:
    return descriptor_kernels.candidates(sm, layout, m, n, k)


with_descriptors = Configurations(__file__, "linear_descriptors", heuristic_of_descriptors, candidates_of_descriptors)


def tiling(x: Tensor, weight: Tensor, gated: bool, precision: str) -> tuple[Config, dict[str, Any], int]:
    """The configuration, the constants of ``products`` with GROUP, and the number of programs."""
    (m, k), rows = x.shape, weight.shape[0]
    layout = kernels.layout_of(x, weight.t())
    config = configuration(x.device, x.dtype, layout, precision, gated, bucket(m), bucket(rows), bucket(k))
    columns = config["BLOCK_N"] // (2 if gated else 1)
    constants = {
        "EVEN_K": k % config["BLOCK_K"] == 0,
        "FILLED": k > 0,
        "PRECISION": precision,
        "BLOCK_M": config["BLOCK_M"],
        "BLOCK_N": columns,
        "BLOCK_K": config["BLOCK_K"],
        "GROUP": config["GROUP"],
    }
    n = rows // (2 if gated else 1)
    return config, constants, triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, columns)


def plan(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: str | None, biased: bool, added: bool, keep: bool,
    precision: str,
) -> Plan:  # fmt: skip
    """Of ``(x, weight, bias, residual, y, pre)``, y and pre contiguous; any tensor stands in for what there is not."""
    chosen = linear_activations.of(activation)
    m, k = x.shape
    n = weight.shape[0] // (2 if chosen.gated else 1)
    others = (bias.stride(0) if biased else 0, *(residual.stride() if added else (0, 0)))
    constants = {"F": chosen.forward, "GATED": chosen.gated, "BIAS": biased, "RESIDUAL": added, "KEEP": keep}
    if descriptor_kernels.fits(x, weight.t()):
        return by_descriptors(linear_descriptors, x, weight, n, others, constants)
    config, tile, programs = tiling(x, weight, chosen.gated, precision)
    scalars = (m, n, k, *x.stride(), *weight.stride(), *others)
    return Plan(linear_tiled, (programs,), scalars, {**constants, **tile}, config["num_warps"], config["num_stages"])


def by_descriptors(
    kernel: Any, x: Tensor, weight: Tensor, n: int, others: tuple[int, ...], constants: dict[str, Any]
) -> DescriptorPlan:
    """The launch of a kernel that takes what linear_descriptors does: ``others`` follow the operands' steps."""
    (m, k), gated = x.shape, constants["GATED"]
    layout = descriptor_kernels.layout_of(x, weight.t())
    config = with_descriptors(x.device, layout, gated, bucket(m), bucket(weight.shape[0]), bucket(k))
    columns = config["BLOCK_N"] // (2 if gated else 1)
    return DescriptorPlan(
        kernel,
        (min(triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, columns), multiprocessors(x.device)),),
        (m, n, k, *descriptor_kernels.steps(x, weight.t(), layout), *others),
        {
            **constants,
            "X_ACROSS": layout[0] == "T",
            "W_ACROSS": layout[1] == "N",
            **{name: config[name] for name in config if name.isupper()},
            "BLOCK_N": columns,
        },
        config["num_warps"],
        config["num_stages"],
    )


plans = Plans(plan)
