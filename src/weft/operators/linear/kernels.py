"""The Triton kernels of a linear layer with its epilogue, and their launches.

y [M, N] = act(x [M, K] · wᵀ + bias) + residual, w [N, K]; of a gated activation w is [2N, K] and y = act(gate) · up + residual,
gate and up being the products with its first and its last N rows. Both halves of a column meet in one program.

Operands are loaded by pointers, or by descriptors where TMA takes them (sm_90 and sm_100; others with TMA have too little
shared memory for these tiles): an operand whose rows run along K brings 128 bytes of each row to a stage, which TMA does at the
rate of the other layout and without registers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import Config, Configurations, bucket
from weft.operators.hopper import tensor_maps
from weft.operators.launch import INTERPRETING, PLAIN, Plan, compile_request, multiprocessors, target_sm
from weft.operators.matmul.kernels import large_tiles, layout_of, round_to_tf32
from weft.operators.quantization.kernels import encode


@triton.jit
def place_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The first row and column of a tile: they run in groups of GROUP tile rows, which share slices of both operands in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    height = min(tiles_m - first, GROUP)
    return (first + tile % in_group % height) * BLOCK_M, tile % in_group // height * BLOCK_N


@triton.jit
def blocks_of(ptr, rows, K, step, ACROSS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The descriptor of an operand with ``rows`` rows of K terms. ACROSS: in memory they run along ``rows`` instead of K;
    ``step``: elements from one line to the next."""
    if ACROSS:
        return tl.make_tensor_descriptor(ptr, [K, rows], [step, 1], [BLOCK_K, BLOCK])
    else:
        return tl.make_tensor_descriptor(ptr, [rows, K], [step, 1], [BLOCK, BLOCK_K])


@triton.jit
def left(blocks, m, k, ACROSS: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of a left operand."""
    if ACROSS:
        return blocks.load([k, m]).T
    else:
        return blocks.load([m, k])


@triton.jit
def right(blocks, n, k, ACROSS: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of a right operand."""
    if ACROSS:
        return blocks.load([k, n])
    else:
        return blocks.load([n, k]).T


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


# ---- codes of the result ---------------------------------------------------------------------------------------------


@triton.jit
def quantize(
    acc, acc_up, scale_ptr, q_ptr, amax_ptr, m, n, M, N,
    F: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, GATED: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """What follows the products of a tile: codes of y / scale, and the largest |y|."""
    if GATED:
        y = F(acc, acc_up, PRECISE)
    else:
        y = F(acc, PRECISE)
    inside = (m[:, None] < M) & (n[None, :] < N)
    magnitude = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr, tl.max(tl.where(inside, magnitude, 0)), sem="relaxed")
    code = encode(y * tl.div_rn(1.0, tl.load(scale_ptr)), 0, FORMAT, False, HARDWARE)
    tl.store(q_ptr + m.to(tl.int64)[:, None] * N + n[None, :], code, mask=inside)


@triton.jit
def linear_quantized_tiled(
    x_ptr, w_ptr, bias_ptr, scale_ptr, q_ptr, amax_ptr, M, N, K, x_row, x_col, w_row, w_col, bias_step,
    F: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, FILLED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """q [M, N]: codes (as bytes) of y / scale. amax, int32 and 0 before: the bits of the largest |y|; of floats that are not
    negative they have the floats' order, and NaN counts as largest."""
    m, n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP)
    acc, acc_up = products(
        x_ptr, w_ptr, bias_ptr, m, n, M, N, K, x_row, x_col, w_row, w_col, bias_step,
        GATED, BIAS, EVEN_K, FILLED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    quantize(acc, acc_up, scale_ptr, q_ptr, amax_ptr, m, n, M, N, F, FORMAT, HARDWARE, GATED, PRECISE)


@triton.jit
def linear_quantized_descriptors(
    x_ptr, w_ptr, bias_ptr, scale_ptr, q_ptr, amax_ptr, M, N, K, x_step, w_step, bias_step,
    F: tl.constexpr, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    X_ACROSS: tl.constexpr, W_ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As linear_quantized_tiled, the operands fetched as linear_descriptors does."""
    tl.assume(K > 0)
    x, w = operands(x_ptr, w_ptr, M, N, K, x_step, w_step, GATED, X_ACROSS, W_ACROSS, BLOCK_M, BLOCK_N, BLOCK_K)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        m, n, acc, acc_up = products_of_blocks(
            x, w, bias_ptr, tile, M, N, K, bias_step, GATED, BIAS, X_ACROSS, W_ACROSS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP
        )
        quantize(acc, acc_up, scale_ptr, q_ptr, amax_ptr, m, n, M, N, F, FORMAT, HARDWARE, GATED, False)


# ---- launches --------------------------------------------------------------------------------------------------------


class DescriptorPlan(Plan):
    """A plan whose kernel makes its descriptors itself, in memory that Triton asks the host for."""

    def __call__(self, *tensors: Tensor) -> None:
        if not INTERPRETING and compile_request() is None:
            triton.set_allocator(_memory)
        super().__call__(*tensors)


def _memory(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # PyTorch's allocator gives multiples of 512 bytes


def _tile(m: int, n: int, k: int, warps: int, stages: int, group: int = 8) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": group, "num_warps": warps, "num_stages": stages}


def heuristic(sm: int, dtype: torch.dtype, layout: str, precision: str, m: int, n: int, k: int) -> Config:
    """Large tiles where there are enough of them to fill the machine; three stages, two where shared memory is 99 KiB."""
    if INTERPRETING:
        return _tile(32, 64, 32, 4, 2, group=1)
    if dtype == torch.float32:
        return _tile(64, 64, 32, 4, 3) if precision == "ieee" else _tile(128, 128, 32, 8, 3)
    if min(m, n) <= 64:
        return _tile(64, 64, 64, 4, 3)
    if m * n <= 1024 * 1024:
        return _tile(64, 128, 64, 4, 3)
    if sm in (90, 100):
        return _tile(128, 256, 64, 8, 3)
    return _tile(128, 128, 32 if sm in (86, 89, 120) else 64, 8, 3)


def candidates(sm: int, dtype: torch.dtype, layout: str, precision: str, m: int, n: int, k: int) -> Iterable[Config]:
    return large_tiles(sm, dtype)


# BLOCK_N and n count rows of w, of both halves
configuration = Configurations(__file__, "linear", heuristic, candidates)


def descriptor_heuristic(sm: int, layout: str, m: int, n: int, k: int) -> Config:
    """Tiles that a multiprocessor's tensor cores are fed with at 48 bytes a clock, or narrower ones where there are few."""
    if INTERPRETING:
        return _tile(32, 64, 32, 4, 2)
    return _tile(128, 256 if m * n > 2**21 else 128, 64, 8, 3)


def descriptor_candidates(sm: int, layout: str, m: int, n: int, k: int) -> Iterable[Config]:
    for columns, depth, stages in ((256, 64, 3), (128, 64, 3), (128, 64, 4), (128, 128, 3)):
        for group in (8, 16):
            yield {**_tile(128, columns, depth, 8, stages), "GROUP": group}


descriptor_configuration = Configurations(__file__, "linear_descriptors", descriptor_heuristic, descriptor_candidates)


def descriptors_fit(x: Tensor, weight: Tensor) -> bool:
    """Whether TMA takes x [M, K] and weight [N, K]: 16-bit floats, rows of both and of y that begin on 16 bytes, terms to add;
    not while tracing, where Triton can ask no host for memory."""
    return (
        target_sm(x.device) in (90, 100)
        and x.dtype != torch.float32
        and x.shape[1] > 0
        and weight.shape[0] % 8 == 0
        and x.__class__ in PLAIN
        and not any(tensor_maps.why_not("", t, 2, t.stride(1) != 1) for t in (x, weight.t()))
    )


def tiled_plan(
    kernel: Any, x: Tensor, weight: Tensor, others: tuple[int, ...], constants: dict[str, Any], precision: str
) -> Plan:
    """The launch of ``linear_tiled`` or ``linear_quantized_tiled``: ``others`` are the scalars after the strides of x and
    weight, ``constants`` what its epilogue has."""
    (m, k), rows, halves = x.shape, weight.shape[0], 2 if constants["GATED"] else 1
    layout = layout_of(x, weight.t())
    config = configuration(x.device, x.dtype, layout, precision, bucket(m), bucket(rows), bucket(k))
    n, columns = rows // halves, config["BLOCK_N"] // halves
    return Plan(
        kernel,
        (triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, columns),),
        (m, n, k, *x.stride(), *weight.stride(), *others),
        {
            **constants,
            "EVEN_K": k % config["BLOCK_K"] == 0,
            "FILLED": k > 0,
            "PRECISION": precision,
            "BLOCK_M": config["BLOCK_M"],
            "BLOCK_N": columns,
            "BLOCK_K": config["BLOCK_K"],
            "GROUP": config["GROUP"],
        },
        config["num_warps"],
        config["num_stages"],
    )


def descriptor_plan(
    kernel: Any, x: Tensor, weight: Tensor, others: tuple[int, ...], constants: dict[str, Any]
) -> DescriptorPlan:
    """As :func:`tiled_plan`, of ``linear_descriptors`` or ``linear_quantized_descriptors``."""
    (m, k), rows, halves = x.shape, weight.shape[0], 2 if constants["GATED"] else 1
    x_across, w_across = x.stride(1) != 1, weight.stride(0) == 1
    layout = ("T" if x_across else "N") + ("N" if w_across else "T")
    config = descriptor_configuration(x.device, layout, bucket(m), bucket(rows), bucket(k))
    n, columns = rows // halves, config["BLOCK_N"] // halves
    steps = x.stride(1 if x_across else 0), weight.stride(1 if w_across else 0)
    return DescriptorPlan(
        kernel,
        (min(triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, columns), multiprocessors(x.device)),),
        (m, n, k, *steps, *others),
        {
            **constants,
            "X_ACROSS": x_across,
            "W_ACROSS": w_across,
            **{name: config[name] for name in config if name.isupper()},
            "BLOCK_N": columns,
        },
        config["num_warps"],
        config["num_stages"],
    )
