"""The Triton kernel of a linear layer whose result leaves as 8-bit codes, and its plan."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.operators.launch import INTERPRETING, Plan, Plans, target_sm
from weft.operators.matmul import linear_activations
from weft.operators.matmul.linear_kernels import products, tile_of_program, tiling
from weft.operators.quantization.formats import FORMATS
from weft.operators.quantization.rounding import encode


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
    if GATED:
        y = F(acc, acc_up, PRECISE)
    else:
        y = F(acc, PRECISE)
    inside = (m[:, None] < M) & (n[None, :] < N)
    magnitude = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # past the edge stand values from within it
    tl.atomic_max(amax_ptr, tl.max(magnitude), sem="relaxed")
    code = encode(y * tl.div_rn(1.0, tl.load(scale_ptr)), 0, FORMAT, False, HARDWARE)
    tl.store(q_ptr + m.to(tl.int64)[:, None] * N + n[None, :], code, mask=inside)


def plan(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str | None, biased: bool, format: str, precision: str
) -> Plan:
    """Of ``(x, weight, bias, scale, q as bytes, amax as int32)``; without a bias any tensor stands in for it."""
    chosen = linear_activations.of(activation)
    config, tile, programs = tiling(x, weight, chosen.gated, precision)
    n = weight.shape[0] // (2 if chosen.gated else 1)
    constants = {
        "F": chosen.forward,
        "FORMAT": format,
        "HARDWARE": FORMATS[format].mantissa > 0 and target_sm(x.device) >= 89 and not INTERPRETING,
        "GATED": chosen.gated,
        "BIAS": biased,
        **tile,
    }
    scalars = (x.shape[0], n, x.shape[1], *x.stride(), *weight.stride(), bias.stride(0) if biased else 0)
    return Plan(linear_quantized_tiled, (programs,), scalars, constants, config["num_warps"], config["num_stages"])


plans = Plans(plan)
