"""The Triton kernel of a linear layer whose result leaves as 8-bit codes, and its plan."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.operators.launch import INTERPRETING, Plan, Plans, target_sm
from weft.operators.linear import linear_activations
from weft.operators.linear.linear_kernels import (
    by_descriptors,
    operands,
    products,
    products_of_blocks,
    tile_of_program,
    tiling,
)
from weft.operators.matmul import descriptor_kernels
from weft.operators.quantization.formats import FORMATS
from weft.operators.quantization.kernels import encode


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


def plan(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, biased: bool, format: str, precision: str
) -> Plan:
    """Of ``(x, weight, bias, scale, q as bytes, amax as int32)``; without a bias any tensor stands in for it."""
    chosen = linear_activations.of(activation)
    n = weight.shape[0] // (2 if chosen.gated else 1)
    step = bias.stride(0) if biased else 0
    constants = {
        "F": chosen.forward,
        "FORMAT": format,
        "HARDWARE": FORMATS[format].mantissa > 0 and target_sm(x.device) >= 89 and not INTERPRETING,
        "GATED": chosen.gated,
        "BIAS": biased,
    }
    if descriptor_kernels.fits(x, weight.t()):
        return by_descriptors(linear_quantized_descriptors, x, weight, n, (step,), constants)
    config, tile, programs = tiling(x, weight, chosen.gated, precision)
    constants |= tile
    scalars = (x.shape[0], n, x.shape[1], *x.stride(), *weight.stride(), step)
    return Plan(linear_quantized_tiled, (programs,), scalars, constants, config["num_warps"], config["num_stages"])


plans = Plans(plan)
