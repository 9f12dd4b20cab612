"""Matrices over their Frobenius norms in two launches: sums of squares by parts, then the quotients, cast on the way out.

Read twice (the second time out of L2, where a batch fits) and written once, where PyTorch's reduction, product, limit and
quotient are five launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.call import FLOATS, on_gpu
from weft.operators.launch import INTERPRETING, Plan, Plans, multiprocessors

BLOCK = 256 if INTERPRETING else 2048  # elements: 16 bytes of 16-bit floats for each of 256 threads
PROGRAMS = 8  # a multiprocessor
MOST_PARTS = 1024  # of a matrix, whose sums one program adds up


@triton.jit
def square_sums(x_ptr, parts_ptr, size, share, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """parts [B, PARTS]: of each ``share`` of x [B, size] the sum of squares, in fp32."""
    part, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = part.to(tl.int64) * share
    end = tl.minimum(first + share, size)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + matrix * size + at, mask=at < end, other=0.0).to(tl.float32)
        sums += x * x
    tl.store(parts_ptr + matrix * PARTS + part, tl.sum(sums, 0))


@triton.jit
def quotients(x_ptr, parts_ptr, y_ptr, size, share, margin, eps, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """y = x / max(margin · norm, eps), in y's dtype."""
    part, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = part.to(tl.int64) * share
    end = tl.minimum(first + share, size)
    total = tl.sum(tl.load(parts_ptr + matrix * PARTS + tl.arange(0, PARTS)), 0)
    norm = tl.sqrt_rn(total) * margin
    norm = tl.where(norm < eps, eps, norm)  # a NaN stays one
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + matrix * size + at, mask=at < end, other=0.0).to(tl.float32)
        tl.store(y_ptr + matrix * size + at, tl.div_rn(x, norm).to(y_ptr.dtype.element_ty), mask=at < end)


def _plans(x: Tensor, dtype: torch.dtype, margin: float, eps: float) -> tuple[Plan, Plan, int]:
    """Both launches, and the parts of a matrix, a power of two."""
    size = x.shape[-2] * x.shape[-1]
    batch = x.numel() // size
    wanted = min(-(-PROGRAMS * multiprocessors(x.device) // batch), -(-size // (2 * BLOCK)), MOST_PARTS)
    parts = 1 << (max(wanted, 1).bit_length() - 1)
    share = -(-size // (parts * BLOCK)) * BLOCK
    constants = {"BLOCK": BLOCK, "PARTS": parts}
    return (
        Plan(square_sums, (parts, batch), (size, share), constants, num_warps=8),
        Plan(quotients, (parts, batch), (size, share, margin, eps), constants, num_warps=8),
        parts,
    )


plans = Plans(_plans)


def takes(x: Tensor) -> bool:
    """Whether the kernels are for x [..., M, N]: dense and not empty, on a GPU, of as many matrices as a grid has rows."""
    matrices = x.shape[:-2].numel()
    return on_gpu(x) and x.dtype in FLOATS and x.is_contiguous() and x.numel() > 0 and matrices < 2**16


def normalised(x: Tensor, margin: float, eps: float, dtype: torch.dtype) -> Tensor:
    """x [..., M, N] over ``margin`` times each matrix's norm, or over ``eps`` where that is larger; what :func:`takes` says."""
    sums, over, parts = plans.of((x,), dtype, margin, eps)
    of_parts = torch.empty((x.shape[:-2].numel(), parts), dtype=torch.float32, device=x.device)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    sums(x, of_parts)
    over(x, of_parts, y)
    return y
