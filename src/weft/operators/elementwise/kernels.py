"""Element-wise Triton kernels. Tensors are [M, N] views of any two strides; dense tensors are one row.

An operator gives its *formula*, a Triton function of fp32 values, which a kernel takes as a compile-time constant.
Everything is computed in fp32 and rounded once.

A program has BLOCK columns of one row (TILE = 0) or of TILE rows: where rows are short, or tensors contiguous along different
dimensions. With TAIL the last program of a row has a branch of its own: a mask for its end would have all programs read
element by element.
"""

import triton
import triton.language as tl


@triton.jit
def place(N, BLOCK: tl.constexpr):
    """This program's row and its BLOCK columns. In int64: tensors may hold more than 2**31 elements."""
    blocks = (N - 1) // BLOCK + 1  # tl.cdiv would overflow just below 2**31 columns
    row = (tl.program_id(0) // blocks).to(tl.int64)
    return row, (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def placed(M, N, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """This program's rows and columns, which broadcast, and which of them exist."""
    if TILE == 0:
        row, col = place(N, BLOCK)
        inside = col < N
    else:
        blocks = (N - 1) // BLOCK + 1
        row = ((tl.program_id(0) // blocks).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]
        col = ((tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
        inside = (row < M) & (col < N)
    return row, col, inside


@triton.jit
def whole(N, BLOCK: tl.constexpr):
    """Whether all of this program's columns exist."""
    return tl.program_id(0) % ((N - 1) // BLOCK + 1) < N // BLOCK


@triton.jit
def read(ptr, row, col, row_stride, col_stride, inside, MASKED: tl.constexpr = True):
    at = ptr + row * row_stride + col * col_stride
    if MASKED:
        x = tl.load(at, mask=inside, other=0, eviction_policy="evict_last")  # the hint: docs/notes/softmax.md
    else:
        x = tl.load(at, eviction_policy="evict_last")
    return x.to(tl.float32)


@triton.jit
def write(ptr, row, col, row_stride, col_stride, inside, value, MASKED: tl.constexpr = True):
    at, value = ptr + row * row_stride + col * col_stride, value.to(ptr.dtype.element_ty)
    if MASKED:
        tl.store(at, value, mask=inside)
    else:
        tl.store(at, value)


@triton.jit
def map_one(
    a_ptr, out_ptr, M, N, a_row, a_col, out_row, out_col,
    F: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """out = F(a, PRECISE); PRECISE says that the result keeps all of fp32."""
    mapped(((a_ptr, a_row, a_col),), ((out_ptr, out_row, out_col),), M, N, F, BLOCK, TILE, TAIL)


@triton.jit
def map_two(
    a_ptr, b_ptr, out_ptr, M, N, a_row, a_col, b_row, b_col, out_row, out_col,
    F: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """out = F(a, b, PRECISE)"""
    mapped(((a_ptr, a_row, a_col), (b_ptr, b_row, b_col)), ((out_ptr, out_row, out_col),), M, N, F, BLOCK, TILE, TAIL)


@triton.jit
def map_three(
    a_ptr, b_ptr, c_ptr, out_ptr, other_ptr, M, N, a_row, a_col, b_row, b_col, c_row, c_col, out_row, out_col,
    other_row, other_col, F: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """out, other = F(a, b, c, PRECISE)"""
    inputs = ((a_ptr, a_row, a_col), (b_ptr, b_row, b_col), (c_ptr, c_row, c_col))
    outputs = ((out_ptr, out_row, out_col), (other_ptr, other_row, other_col))
    mapped(inputs, outputs, M, N, F, BLOCK, TILE, TAIL)


@triton.jit
def map_three_to_three(
    a_ptr, b_ptr, c_ptr, out_ptr, other_ptr, third_ptr, M, N, a_row, a_col, b_row, b_col, c_row, c_col, out_row, out_col,
    other_row, other_col, third_row, third_col,
    F: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """out, other, third = F(a, b, c, PRECISE)"""
    inputs = ((a_ptr, a_row, a_col), (b_ptr, b_row, b_col), (c_ptr, c_row, c_col))
    outputs = ((out_ptr, out_row, out_col), (other_ptr, other_row, other_col), (third_ptr, third_row, third_col))
    mapped(inputs, outputs, M, N, F, BLOCK, TILE, TAIL)


@triton.jit
def mapped(inputs, outputs, M, N, F: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr):
    """Tensors are (pointer, two strides)."""
    if TAIL:
        if whole(N, BLOCK):
            map_block(inputs, outputs, M, N, F, BLOCK, TILE, False)
        else:
            map_block(inputs, outputs, M, N, F, BLOCK, TILE, True)
    else:
        map_block(inputs, outputs, M, N, F, BLOCK, TILE, True)


@triton.jit
def map_block(inputs, outputs, M, N, F: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    row, col, inside = placed(M, N, BLOCK, TILE)
    PRECISE: tl.constexpr = outputs[0][0].dtype.element_ty == tl.float32
    values = ()
    for i in tl.static_range(len(inputs)):
        values += (read(inputs[i][0], row, col, inputs[i][1], inputs[i][2], inside, MASKED),)  # type: ignore[assignment]
    results = F(*values, PRECISE)
    if len(outputs) == 1:
        results = (results,)
    for i in tl.static_range(len(outputs)):
        write(outputs[i][0], row, col, outputs[i][1], outputs[i][2], inside, results[i], MASKED)


# ---- relu: bits [rows, ceil(N / 8)] uint8, bit i of byte j is column 8 j + i -----------------------------------------


@triton.jit
def relu(x, PRECISE: tl.constexpr):
    return tl.where(x < 0, 0.0, x)  # NaN passes through


@triton.jit
def bytes_at(bits_ptr, row, N, BLOCK: tl.constexpr):
    """The addresses of the bits of this program's columns, and which of these bytes exist."""
    width = (N - 1) // 8 + 1
    byte = (tl.program_id(0) % ((N - 1) // BLOCK + 1)).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    return bits_ptr + row * width + byte, byte < width


@triton.jit
def relu_with_bits(
    x_ptr, y_ptr, bits_ptr, M, N, x_row, x_col, y_row, y_col, BLOCK: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    row, col = place(N, BLOCK)
    if TAIL:
        if whole(N, BLOCK):
            x = read(x_ptr, row, col, x_row, x_col, col < N, False)
            write(y_ptr, row, col, y_row, y_col, col < N, relu(x, True), False)
        else:
            x = read(x_ptr, row, col, x_row, x_col, col < N)
            write(y_ptr, row, col, y_row, y_col, col < N, relu(x, True))
    else:
        x = read(x_ptr, row, col, x_row, x_col, col < N)
        write(y_ptr, row, col, y_row, y_col, col < N, relu(x, True))
    passes = tl.where(x <= 0, 0, 1)  # NaN passes
    packed = tl.sum(tl.reshape(passes, [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :], axis=1)
    at, there = bytes_at(bits_ptr, row, N, BLOCK)
    tl.store(at, packed.to(tl.uint8), mask=there)


@triton.jit
def relu_backward(
    dy_ptr, bits_ptr, dx_ptr, M, N, dy_row, dy_col, dx_row, dx_col,
    BLOCK: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if TAIL:
        if whole(N, BLOCK):
            relu_gradient(dy_ptr, bits_ptr, dx_ptr, N, dy_row, dy_col, dx_row, dx_col, BLOCK, False)
        else:
            relu_gradient(dy_ptr, bits_ptr, dx_ptr, N, dy_row, dy_col, dx_row, dx_col, BLOCK, True)
    elif TILE:  # bits lie as dx does, which is dense
        row, col, inside = placed(M, N, BLOCK, TILE)
        dy = read(dy_ptr, row, col, dy_row, dy_col, inside)
        at = row * dx_row + col * dx_col
        passes = (tl.load(bits_ptr + at // 8, mask=inside, other=0).to(tl.int32) >> (at % 8).to(tl.int32)) & 1
        write(dx_ptr, row, col, dx_row, dx_col, inside, tl.where(passes != 0, dy, 0.0))
    else:
        relu_gradient(dy_ptr, bits_ptr, dx_ptr, N, dy_row, dy_col, dx_row, dx_col, BLOCK, True)


@triton.jit
def relu_gradient(
    dy_ptr, bits_ptr, dx_ptr, N, dy_row, dy_col, dx_row, dx_col, BLOCK: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    row, col = place(N, BLOCK)
    dy = read(dy_ptr, row, col, dy_row, dy_col, col < N, MASKED)
    at, there = bytes_at(bits_ptr, row, N, BLOCK)
    packed = tl.load(at, mask=there, other=0).to(tl.int32)
    passes = tl.reshape((packed[:, None] >> tl.arange(0, 8)[None, :]) & 1, [BLOCK])
    write(dx_ptr, row, col, dx_row, dx_col, col < N, tl.where(passes != 0, dy, 0.0), MASKED)


# ---- the curves that activations are made of -------------------------------------------------------------------------
# PRECISE is for fp32 results, which keep every bit; 16-bit results leave half of the instructions for the same bytes.


@triton.jit
def exp(t, PRECISE: tl.constexpr):
    """exp(t). ``tl.exp`` takes ``ex2`` of t · log2(e), whose rounding alone costs |t|/2 ulp; PRECISE adds what it lost."""
    if PRECISE:
        high = t * 1.4426950408889634
        lost = tl.fma(t, 1.4426950216293335, -high) + t * 1.9259629911266174e-8  # log2(e) as a sum of two floats
        power = tl.exp2(high)
        return tl.where(tl.abs(t) < 150.0, power + power * (lost * 0.6931471805599453), power)
    else:
        return tl.exp(t)


@triton.jit
def logistic(x, PRECISE: tl.constexpr):
    return 1.0 / (1.0 + exp(-x, PRECISE))


@triton.jit
def normal_cdf(x, PRECISE: tl.constexpr):
    """Φ(x), the normal distribution's.

    For 16-bit results: the logistic function of an odd polynomial, whose coefficients (in powers of two) are fitted to
    log2(Φ(x) / Φ(-x)) on -6 … 6 by Lawson's iteration; Φ is off by at most 1.6e-4 of itself there, in both tails, which is
    less than half a unit in the last place of float16. Further out it falls exponentially.
    """
    if PRECISE:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    else:
        s = tl.minimum(x * x, 36.0)
        q = 3.394939028e-09 - 2.230787179e-11 * s
        q = 6.702333398e-06 + s * (-2.10922951e-07 + s * q)
        q = -4.43768993e-04 + s * (-1.005590223e-04 + s * q)
        q = 2.3015770884 + s * (0.105716228466 + s * q)
        return 1.0 / (1.0 + tl.exp2(-x * q))


@triton.jit
def gelu_slope(x, phi, PRECISE: tl.constexpr):
    """d/dx of x Φ(x), given Φ(x)."""
    if PRECISE:
        bell = exp(-0.5 * x * x, True)
    else:
        bell = tl.exp2(-0.7213475204444817 * x * x)  # log2(e) / 2
    return phi + 0.3989422804014327 * x * bell  # 1 / sqrt(2 pi)


@triton.jit
def tanh_argument(x):
    """2u, of which the logistic function is (1 + tanh u) / 2, the tanh form Φ' of Φ; u = sqrt(2/pi) (x + 0.044715 x³)."""
    return x * (1.5957691216057308 + 0.07135481282730322 * (x * x))


@triton.jit
def tanh_cdf(x, PRECISE: tl.constexpr):
    """Φ'(x), and Φ' (1 - Φ'), for fp32 results without the cancellation in 1 - Φ'."""
    if PRECISE:
        u = tanh_argument(x)
        a = exp(-tl.abs(u), True)
        r = 1.0 / (1.0 + a)
        return r * tl.where(u > 0, 1.0, a), a * r * r
    else:
        phi = 1.0 / (1.0 + tl.exp(-tanh_argument(x)))
        return phi, phi - phi * phi


@triton.jit
def tanh_gelu_slope(x, phi, rest):
    """d/dx of x Φ'(x), given tanh_cdf(x)."""
    return phi + x * rest * (1.5957691216057308 + 0.21406443848190965 * (x * x))
