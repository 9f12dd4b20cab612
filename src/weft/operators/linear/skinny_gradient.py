"""The gradient of a weight from few rows: dw [N, K] = dyᵀ · x of dy [M, N] and x [M, K].

M multiply-adds an element that is written: the rate at which dw leaves is the limit. cuBLAS takes 108 µs for M = 1 and
N = K = 8192 in bf16 on an H200, PyTorch's product of a column and a row about 130, where writing takes 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.launch import INTERPRETING, Plan, Plans

MOST_ROWS = 16  # of x: what one product of tensor cores takes
IN_REGISTERS = 4  # up to which each of them is multiplied alone


@triton.jit
def sum_of_outer_products(
    dy_ptr, x_ptr, dw_ptr, N, K, dy_row, dy_col, x_row, x_col,
    M: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw, row-major. A program has ROWS rows and BLOCK_K columns; neighbouring programs lie beside one another. TOKENS: 0, or
    how many rows of dy and x, with those that are not there, tensor cores multiply."""
    across = tl.cdiv(K, BLOCK_K)
    n = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) % across * BLOCK_K + tl.arange(0, BLOCK_K)
    dy = dy_ptr + n.to(tl.int64) * dy_col
    x = x_ptr + k.to(tl.int64) * x_col
    acc = tl.zeros([ROWS, BLOCK_K], tl.float32)
    if TOKENS:
        m = tl.arange(0, TOKENS)
        left = tl.load(
            dy[:, None] + m.to(tl.int64)[None, :] * dy_row, mask=(n < N)[:, None] & (m < M)[None, :], other=0.0
        )
        right = tl.load(
            x[None, :] + m.to(tl.int64)[:, None] * x_row, mask=(k < K)[None, :] & (m < M)[:, None], other=0.0
        )
        acc = tl.dot(left, right, acc, input_precision="ieee")
    else:
        for _ in tl.static_range(M):
            left = tl.load(dy, mask=n < N, other=0.0).to(tl.float32)
            acc += left[:, None] * tl.load(x, mask=k < K, other=0.0).to(tl.float32)[None, :]
            dy += dy_row
            x += x_row
    at = dw_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, acc.to(dw_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def plan(dy: Tensor, x: Tensor) -> Plan:
    """Of ``(dy, x, dw)``, dw row-major."""
    (m, n), k = dy.shape, x.shape[1]
    tokens = 0 if m <= IN_REGISTERS else MOST_ROWS
    line = 512 // x.element_size()  # of a warp that writes 16 bytes a lane
    rows, block = (16, 32) if INTERPRETING else (64, line) if tokens else (8, 4 * line)
    return Plan(
        sum_of_outer_products,
        (triton.cdiv(n, rows) * triton.cdiv(k, block),),
        (n, k, *dy.stride(), *x.stride()),
        {"M": m, "TOKENS": tokens, "ROWS": rows, "BLOCK_K": block},
        num_warps=8 if tokens else 4,
    )


plans = Plans(plan)


def of_weight(dy: Tensor, x: Tensor) -> Tensor:
    """dw of :data:`MOST_ROWS` rows at most, summed in fp32 and rounded once."""
    dw = torch.empty(dy.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    if dw.numel():
        plans.of((dy, x))(dy, x, dw)
    return dw
