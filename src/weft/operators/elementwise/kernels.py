"""Element-wise Triton kernels. Tensors are [M, N] views of any two strides; dense tensors are one row.

An operator gives its *formula*, a Triton function of fp32 values, which a kernel takes as a compile-time constant.
Everything is computed in fp32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(N, BLOCK: tl.constexpr):
    """This program's row and its BLOCK columns. In int64: tensors may hold more than 2**31 elements."""
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    return row, (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def read(ptr, row, col, row_stride, col_stride, N):
    at = ptr + row * row_stride + col * col_stride
    return tl.load(at, mask=col < N, eviction_policy="evict_last").to(tl.float32)  # the hint: docs/notes/softmax.md


@triton.jit
def write(ptr, row, col, row_stride, col_stride, N, value):
    tl.store(ptr + row * row_stride + col * col_stride, value.to(ptr.dtype.element_ty), mask=col < N)


@triton.jit
def map_one(a_ptr, out_ptr, N, a_row, a_col, out_row, out_col, F: tl.constexpr, BLOCK: tl.constexpr):
    """out = F(a, PRECISE); PRECISE says that the result keeps all of fp32."""
    row, col = place(N, BLOCK)
    PRECISE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
    a = read(a_ptr, row, col, a_row, a_col, N)
    write(out_ptr, row, col, out_row, out_col, N, F(a, PRECISE))


@triton.jit
def map_two(
    a_ptr, b_ptr, out_ptr, N, a_row, a_col, b_row, b_col, out_row, out_col, F: tl.constexpr, BLOCK: tl.constexpr
):
    """out = F(a, b, PRECISE)"""
    row, col = place(N, BLOCK)
    PRECISE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
    a = read(a_ptr, row, col, a_row, a_col, N)
    b = read(b_ptr, row, col, b_row, b_col, N)
    write(out_ptr, row, col, out_row, out_col, N, F(a, b, PRECISE))


@triton.jit
def map_three(
    a_ptr, b_ptr, c_ptr, out_ptr, other_ptr, N, a_row, a_col, b_row, b_col, c_row, c_col, out_row, out_col,
    other_row, other_col, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out, other = F(a, b, c, PRECISE)"""
    row, col = place(N, BLOCK)
    PRECISE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
    a = read(a_ptr, row, col, a_row, a_col, N)
    b = read(b_ptr, row, col, b_row, b_col, N)
    c = read(c_ptr, row, col, c_row, c_col, N)
    out, other = F(a, b, c, PRECISE)
    write(out_ptr, row, col, out_row, out_col, N, out)
    write(other_ptr, row, col, other_row, other_col, N, other)


# ---- relu: bits [rows, ceil(N / 8)] uint8, bit i of byte j is column 8 j + i -----------------------------------------


@triton.jit
def relu(x, PRECISE: tl.constexpr):
    return tl.where(x < 0, 0.0, x)  # NaN passes through


@triton.jit
def bytes_at(bits_ptr, row, N, BLOCK: tl.constexpr):
    """The addresses of the bits of this program's columns, and which of these bytes exist."""
    width = tl.cdiv(N, 8).to(tl.int64)
    byte = (tl.program_id(0) % tl.cdiv(N, BLOCK)).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    return bits_ptr + row * width + byte, byte < width


@triton.jit
def relu_with_bits(x_ptr, y_ptr, bits_ptr, N, x_row, x_col, y_row, y_col, BLOCK: tl.constexpr):
    row, col = place(N, BLOCK)
    x = read(x_ptr, row, col, x_row, x_col, N)
    write(y_ptr, row, col, y_row, y_col, N, relu(x, True))
    passes = tl.where(x <= 0, 0, 1)  # NaN passes
    packed = tl.sum(tl.reshape(passes, [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :], axis=1)
    at, there = bytes_at(bits_ptr, row, N, BLOCK)
    tl.store(at, packed.to(tl.uint8), mask=there)


@triton.jit
def relu_backward(dy_ptr, bits_ptr, dx_ptr, N, dy_row, dy_col, dx_row, dx_col, BLOCK: tl.constexpr):
    row, col = place(N, BLOCK)
    dy = read(dy_ptr, row, col, dy_row, dy_col, N)
    at, there = bytes_at(bits_ptr, row, N, BLOCK)
    packed = tl.load(at, mask=there, other=0).to(tl.int32)
    passes = tl.reshape((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1, [BLOCK])
    write(dx_ptr, row, col, dx_row, dx_col, N, tl.where(passes != 0, dy, 0.0))
