"""Products with a CSR matrix under autograd: A·x or A·B, whose gradients are a product with Aᵀ and sampled dot products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.call import KernelFunction, differentiable, reference_gradients
from weft.operators.configs import bucket
from weft.operators.launch import Plan, Plans
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.pattern import rows_of_elements


@triton.jit
def sampled_dots(
    rows_ptr, columns_ptr, dy_ptr, b_ptr, out_ptr, Z, K, dy_row, dy_col, b_row, b_col,
    ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[z] = dy[row of z, :] · b[column of z, :], of ELEMENTS side by side (a sampled dense-dense product, SDDMM)."""
    z = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    row = tl.load(rows_ptr + z, mask=z < Z, other=0).to(tl.int64)[:, None]
    column = tl.load(columns_ptr + z, mask=z < Z, other=0).to(tl.int64)[:, None]
    total = tl.zeros([ELEMENTS, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        k = (start + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
        inside = (z[:, None] < Z) & (k < K)
        dy = tl.load(dy_ptr + row * dy_row + k * dy_col, mask=inside, other=0.0).to(tl.float32)
        total += dy * tl.load(b_ptr + column * b_row + k * b_col, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + z, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=z < Z)


def _sampled_plan(rows: Tensor, columns: Tensor, dy: Tensor, b: Tensor) -> Plan:
    """Of ``(rows, columns, dy, b, out)``: dy [M, K], b [N, K]."""
    z, k = len(columns), b.shape[1]
    tile = {"ELEMENTS": max(1024 // bucket(k), 8), "BLOCK": min(bucket(k), 128)}
    return Plan(sampled_dots, (triton.cdiv(z, tile["ELEMENTS"]),), (z, k, *dy.stride(), *b.stride()), tile, num_warps=4)


sampled_plans = Plans(_sampled_plan)


def gradient_of_values(matrix: CSR, dy: Tensor, b: Tensor) -> Tensor:
    """[Z], of dy [M] and b [N], or dy [M, K] and b [N, K]."""
    out = torch.empty_like(matrix.values)
    if matrix.stored and dy.numel():
        dy, b = (t[:, None] if t.ndim == 1 else t for t in (dy, b))
        rows = rows_of_elements(matrix.row_offsets, matrix.stored)
        sampled_plans.of((rows, matrix.columns, dy, b))(rows, matrix.columns, dy, b, out)
        return out
    return out.zero_()


@dataclass(frozen=True)
class Product:
    """How a product is made: ``launch(matrix, b, kernel)``, and ``reference(matrix, b)`` for gradients of gradients."""

    launch: Callable[[CSR, Tensor, str], Tensor]
    reference: Callable[[CSR, Tensor], Tensor]

    def __call__(self, matrix: CSR, b: Tensor, kernel: str) -> Tensor:
        """A·b by the kernel of that name."""
        out: Tensor = differentiable(_Product, matrix.values, b, matrix, self, kernel)
        return out


class _Product(KernelFunction):
    @staticmethod
    def forward(ctx: Any, values: Tensor, b: Tensor, matrix: CSR, how: Product, kernel: str) -> Tensor:
        # the pattern only so that autograd sees it changed in place before backward
        ctx.save_for_backward(values, b, matrix.row_offsets, matrix.columns)
        ctx.matrix, ctx.how, ctx.kernel = matrix, how, kernel
        return how.launch(matrix, b, kernel)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, b, *_ = ctx.saved_tensors
        matrix = ctx.matrix.with_values(values)
        if torch.is_grad_enabled():

            def product(values: Tensor, b: Tensor) -> Tensor:
                return ctx.how.reference(matrix.with_values(values), b)

            return *reference_gradients(product, (values, b), ctx.needs_input_grad[:2], (dy,)), None, None, None
        dvalues = gradient_of_values(matrix, dy, b) if ctx.needs_input_grad[0] else None
        db = ctx.how.launch(matrix.transposed(), dy, ctx.kernel) if ctx.needs_input_grad[1] else None
        return dvalues, db, None, None, None
