"""Triton kernels: batched products with an epilogue, C = beta·A·B + of_a·A + of_b·B, and matrices over their norms.

``symmetric_product`` is for results that are symmetric (A·Aᵀ, or A·B of symmetric matrices that commute, as polynomials of one
matrix do): it computes the tiles on and below the diagonal, half of the operations, and writes each also where it is mirrored.
``product`` computes all tiles. Both sum in fp32 and take any strides.

``square_sums`` and ``quotients`` divide matrices by their Frobenius norms in two launches: read twice (the second time from L2,
where a batch fits) and written once, where PyTorch's reduction, product, limit and quotient are five launches.
"""

import triton
import triton.language as tl

from weft.operators.matmul.kernels import round_to_tf32, tile_of

# ---- tiles of a symmetric matrix -------------------------------------------------------------------------------------
#
# Tiles on and below the diagonal are numbered so that programs which run together share operands. Tile rows are taken in bands
# of GROUP. A band is a rectangle (columns left of its first row's diagonal tile), numbered column by column, and then the
# triangle of GROUP tile rows on the diagonal. Bands end where triangular numbers do, so a number's band follows from one square
# root.


def tiles(rows: int) -> int:
    """Tiles on and below the diagonal of ``rows`` × ``rows`` tiles."""
    return rows * (rows + 1) // 2


@triton.jit
def triangular_root(t):
    """The largest r with r · (r + 1) / 2 <= t, for 0 <= t < 2**29."""
    r = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    r = tl.where(r * (r + 1) // 2 > t, r - 1, r)  # fp32 holds 24 bits of t: off by one at most
    return tl.where((r + 1) * (r + 2) // 2 <= t, r + 1, r)


@triton.jit
def lower_tile(t, rows, GROUP: tl.constexpr):
    """The t-th tile: its (row, column), column <= row."""
    first = triangular_root(t) // GROUP * GROUP  # the band's first tile row
    height = min(rows - first, GROUP)
    t -= first * (first + 1) // 2
    # the rectangle of columns 0 … first - 1
    row, column = first + t % height, t // height
    # the triangle after it
    u = max(t - first * height, 0)
    r = triangular_root(u)
    inside = t < first * height
    return tl.where(inside, row, first + r), tl.where(inside, column, first + u - r * (r + 1) // 2)


# ---- products --------------------------------------------------------------------------------------------------------


@triton.jit
def tile_product(
    a_ptr, b_ptr, m, n, K, a_row, a_col, b_row, b_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A[m, :] · B[:, n] in fp32 [BLOCK_M, BLOCK_N], for int64 rows m and columns n that are valid."""
    k = tl.arange(0, BLOCK_K)
    a = a_ptr + m[:, None] * a_row + k.to(tl.int64)[None, :] * a_col  # [BLOCK_M, BLOCK_K]
    b = b_ptr + k.to(tl.int64)[:, None] * b_row + n[None, :] * b_col  # [BLOCK_K, BLOCK_N]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a_tile, b_tile = tl.load(a), tl.load(b)
        else:
            a_tile = tl.load(a, mask=k[None, :] < K - start, other=0.0)
            b_tile = tl.load(b, mask=k[:, None] < K - start, other=0.0)
        if PRECISION == "tf32" and a_ptr.dtype.element_ty == tl.float32:
            a_tile, b_tile = round_to_tf32(a_tile), round_to_tf32(b_tile)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        a += BLOCK_K * a_col
        b += BLOCK_K * b_row
    return acc


@triton.jit
def with_operands(
    acc, a_ptr, b_ptr, m, n, a_row, a_col, b_row, b_col, beta, of_a, of_b, ADDS_A: tl.constexpr, ADDS_B: tl.constexpr
):
    """The epilogue, in fp32: beta · acc + of_a · A[m, n] + of_b · B[m, n]."""
    acc *= beta
    if ADDS_A:
        acc += of_a * tl.load(a_ptr + m[:, None] * a_row + n[None, :] * a_col).to(tl.float32)
    if ADDS_B:
        acc += of_b * tl.load(b_ptr + m[:, None] * b_row + n[None, :] * b_col).to(tl.float32)
    return acc


@triton.jit
def symmetric_product(
    a_ptr, b_ptr, c_ptr, M, K, a_batch, a_row, a_col, b_batch, b_row, b_col, beta, of_a, of_b,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    ADDS_A: tl.constexpr, ADDS_B: tl.constexpr,
):  # fmt: skip
    """One program computes one BLOCK × BLOCK tile on or below the diagonal of one of the matrices C [M, M] (contiguous), and
    writes it and its mirror image, both row by row: the tile is transposed in shared memory. C is symmetric to the bit, in
    tiles on the diagonal too, whose upper half is taken from the lower."""
    rows = tl.cdiv(M, BLOCK)
    tiles = rows * (rows + 1) // 2
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    row, column = lower_tile(tl.program_id(0) % tiles, rows, GROUP)
    a_ptr += matrix * a_batch
    b_ptr += matrix * b_batch
    c_ptr += matrix * M * M

    m = row * BLOCK + tl.arange(0, BLOCK)
    n = column * BLOCK + tl.arange(0, BLOCK)
    # rows and columns past the edge wrap around to valid ones and are not stored
    m_valid, n_valid = (m % M).to(tl.int64), (n % M).to(tl.int64)
    acc = tile_product(
        a_ptr, b_ptr, m_valid, n_valid, K, a_row, a_col, b_row, b_col, BLOCK, BLOCK, BLOCK_K, EVEN_K, PRECISION
    )
    acc = with_operands(
        acc, a_ptr, b_ptr, m_valid, n_valid, a_row, a_col, b_row, b_col, beta, of_a, of_b, ADDS_A, ADDS_B
    )
    tile = acc.to(c_ptr.dtype.element_ty)
    mirrored = tl.trans(tile)
    if row == column:
        tile = tl.where(m[:, None] >= n[None, :], tile, mirrored)
    wide_m, wide_n = m.to(tl.int64), n.to(tl.int64)
    tl.store(c_ptr + wide_m[:, None] * M + wide_n[None, :], tile, mask=(m[:, None] < M) & (n[None, :] < M))
    if row != column:
        tl.store(c_ptr + wide_n[:, None] * M + wide_m[None, :], mirrored, mask=(n[:, None] < M) & (m[None, :] < M))


@triton.jit
def mirror(c_ptr, M, BLOCK: tl.constexpr):
    """Writes the elements below the diagonal of each matrix C [M, M] above it too."""
    rows = tl.cdiv(M, BLOCK)
    tiles = rows * (rows + 1) // 2
    row, column = lower_tile(tl.program_id(0) % tiles, rows, 8)
    c_ptr += (tl.program_id(0) // tiles).to(tl.int64) * M * M
    m = (row * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    n = (column * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    tile = tl.load(c_ptr + m[:, None] * M + n[None, :], mask=(m[:, None] < M) & (n[None, :] < M), other=0.0)
    tl.store(c_ptr + n[:, None] * M + m[None, :], tl.trans(tile), mask=(n[:, None] < m[None, :]) & (m[None, :] < M))


@triton.jit
def product(
    a_ptr, b_ptr, c_ptr, M, N, K, a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col, beta, of_b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one BLOCK_M × BLOCK_N tile of one of the matrices C = beta·A·B + of_b·B, with A [M, M]."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    m, n = tile_of(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
    a_ptr += matrix * a_batch
    b_ptr += matrix * b_batch
    c_ptr += matrix * c_batch

    m_valid, n_valid = (m % M).to(tl.int64), (n % N).to(tl.int64)
    acc = tile_product(
        a_ptr, b_ptr, m_valid, n_valid, K, a_row, a_col, b_row, b_col, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION
    )
    acc = with_operands(acc, a_ptr, b_ptr, m_valid, n_valid, a_row, a_col, b_row, b_col, beta, 0.0, of_b, False, True)
    c = c_ptr + m.to(tl.int64)[:, None] * c_row + n.to(tl.int64)[None, :] * c_col
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


# ---- norms -----------------------------------------------------------------------------------------------------------


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
