"""``relu(x)``: max(x, 0). Forward reads x and writes y: nothing but bandwidth.

The gradient needs one bit of each element. Where a gradient is wanted, forward packs these bits (1/32 of a float32 tensor),
so backward reads dy and the bits instead of dy and y, and x may be overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Mutant, Operator
from weft.operators.call import KernelFunction, dense, rows_of, views
from weft.operators.elementwise.definition import define
from weft.operators.elementwise.pointwise import Pointwise, configuration, laid_out, like, place, read, write
from weft.operators.launch import Plan, Plans

# ---- kernels; bits [rows, ceil(N / 8)] uint8, bit i of byte j is column 8 j + i ---------------------------------------


@triton.jit
def forward(x, PRECISE: tl.constexpr):
    return tl.where(x < 0, 0.0, x)  # NaN passes through


@triton.jit
def bytes_at(bits_ptr, row, N, BLOCK: tl.constexpr):
    """Where the bits of this program's columns lie, and which of these bytes exist."""
    width = tl.cdiv(N, 8).to(tl.int64)
    byte = (tl.program_id(0) % tl.cdiv(N, BLOCK)).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    return bits_ptr + row * width + byte, byte < width


@triton.jit
def forward_with_bits(x_ptr, y_ptr, bits_ptr, N, x_row, x_col, y_row, y_col, BLOCK: tl.constexpr):
    row, col = place(N, BLOCK)
    x = read(x_ptr, row, col, x_row, x_col, N)
    write(y_ptr, row, col, y_row, y_col, N, forward(x, True))
    passes = tl.where(x <= 0, 0, 1)  # NaN passes
    packed = tl.sum(tl.reshape(passes, [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :], axis=1)
    at, there = bytes_at(bits_ptr, row, N, BLOCK)
    tl.store(at, packed.to(tl.uint8), mask=there)


@triton.jit
def backward(dy_ptr, bits_ptr, dx_ptr, N, dy_row, dy_col, dx_row, dx_col, BLOCK: tl.constexpr):
    row, col = place(N, BLOCK)
    dy = read(dy_ptr, row, col, dy_row, dy_col, N)
    at, there = bytes_at(bits_ptr, row, N, BLOCK)
    packed = tl.load(at, mask=there, other=0).to(tl.int32)
    passes = tl.reshape((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1, [BLOCK])
    write(dx_ptr, row, col, dx_row, dx_col, N, tl.where(passes != 0, dy, 0.0))


# ---- call ------------------------------------------------------------------------------------------------------------


class Layout:
    """Of x and its result (x itself, in place): how their rows lie, so that the bits of a place are found again; and the
    launches over them."""

    def __init__(self, x: Tensor, inplace: bool):
        result = x if inplace else like(x)
        self.size, self.stride = x.size(), like(x).stride()
        self.flat = dense(x)  # then bits lie in the order of x's memory, and dy is read in that order
        self.rows, self.columns, strides = laid_out(x, result)
        self.bits = (self.rows, triton.cdiv(self.columns, 8))
        self.forward = self.plan(forward_with_bits, x, strides)

    def plan(self, kernel: Any, x: Tensor, strides: tuple[int, ...]) -> Plan:
        config = configuration(1, x, self.columns)
        grid = (self.rows * triton.cdiv(self.columns, config["BLOCK"]),)
        return Plan(kernel, grid, (self.columns, *strides), {"BLOCK": config["BLOCK"]}, config["num_warps"])

    def strides(self, dy: Tensor, dx: Tensor) -> tuple[int, ...]:
        return (0, 1) * 2 if self.flat else tuple(stride for view in views(dy, dx) for stride in view[2:])

    def gradient(self, dy: Tensor, bits: Tensor) -> Tensor:
        dx = torch.empty_strided(self.size, self.stride, dtype=dy.dtype, device=dy.device)
        if dx.numel():
            if dy.stride() != self.stride and (self.flat or rows_of(dy) is None):
                dy = torch.empty_like(dx).copy_(dy)  # autograd may bring one of any strides (expanded, say)
            backward_plans.of((dy, bits, dx), self)(dy, bits, dx)
        return dx


layouts = Plans(Layout)
backward_plans = Plans(lambda dy, bits, dx, layout: layout.plan(backward, dy, layout.strides(dy, dx)))


class Relu(KernelFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        y = x if inplace else torch.empty_like(x)
        if inplace:
            ctx.mark_dirty(y)
        if any(ctx.needs_input_grad):
            ctx.layout = layouts.of((x,), inplace)
            bits = torch.empty(ctx.layout.bits, dtype=torch.uint8, device=x.device)
            ctx.save_for_backward(bits)
            if y.numel():
                ctx.layout.forward(x, y, bits)
        elif y.numel():
            (pointwise.inplace_plans if inplace else pointwise.forward_plans).of((x,))(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return Gradient.apply(dy, *ctx.saved_tensors, ctx.layout), None


class Gradient(KernelFunction):
    """dx of dy: linear, so it is its own gradient."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, bits: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(bits)
        return layout.gradient(dy, bits)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return Gradient.apply(g, *ctx.saved_tensors, ctx.layout), None, None


# ---- definition ------------------------------------------------------------------------------------------------------


def reference(x: Tensor) -> Tensor:
    return torch.relu(x)


pointwise = Pointwise("relu", ("x",), forward, None, reference, function=Relu)

relu = Operator(
    **define(
        "relu",
        ("x",),
        reference,
        flops=1,
        special_ops=0,
        backward_reads=1,
        backward_bits=1,
        tuned=True,
        exact=True,
        wrong=[
            Mutant("leaks", lambda x: torch.nn.functional.leaky_relu(x, 1e-3)),
            Mutant("NaN to zero", lambda x: x.nan_to_num(0.0, torch.inf, -torch.inf).clamp_min(0)),
            Mutant("gradient passes everywhere", lambda dy, x: (dy.clone(),), "backward"),
        ],
    )
)
pointwise.implement(relu)


@relu.function
def relu_function(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Rectifier, element by element.

    Args:
        x: any shape; float32, float16 or bfloat16.
        inplace: write the result over x. Gradients still work: they are taken from one bit an element.

    Returns:
        ``max(x, 0)``, the same bits as PyTorch's; NaN stays NaN. With ``inplace``, x itself.

    Raises:
        TypeError: not a tensor of those dtypes.
    """
    return pointwise(x, inplace=inplace)
