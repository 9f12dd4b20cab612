"""The Triton kernels of a linear layer with a row or two of x, forward and for the weight's gradient, and their launches.

y[M, N] = x[M, K] · w[N, K]ᵀ reads N·K elements of w for 2·M·N·K operations: M operations a byte in 16 bits, so the rate at
which w is read is the limit. Each element of w is read once, 16 bytes at a time, and multiplied in registers. The gradient
dw = dyᵀ · x writes N·K elements: the rate of writing is the limit.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import SHARED_LIMIT
from weft.operators.configs import Config, Configurations, bucket, constants_of, grid_of
from weft.operators.cuda import pointer_aligned
from weft.operators.launch import INTERPRETING, Plan
from weft.operators.linear.activations import NONE, Activation
from weft.operators.partial_sums import SplitPlan, in_parts, parts_of

# M rows of x, N rows of w, K columns of both
MOST_ROWS = 2  # of x; of more, cuBLAS was measured to be as fast or faster
FILLS = 96  # programs of four warps or more that keep a machine's memory busy: most have 84 to 170 multiprocessors
ASKED = 256  # bytes of w and of x that a thread may have asked for at once, in 64 of its registers


@triton.jit
def store_rows(y_ptr, bias_ptr, bias_col, y, m, n, M, N, part, HAS_BIAS: tl.constexpr):
    """y [rows of w, rows of x] with the bias, which one part of a split sum adds, into row-major [parts, M, N]."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n.to(tl.int64) * bias_col, mask=(n < N) & (part == 0), other=0.0).to(tl.float32)
        y += bias[:, None]
    at = y_ptr + (part.to(tl.int64) * M + m)[None, :] * N + n[:, None]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < M))


@triton.jit
def skinny_vector(
    x_ptr, w_ptr, bias_ptr, y_ptr, M, N, k_vectors, x_row, x_col, w_row, w_col, bias_col,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, VEC: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows of w and TOKENS of x. All its LANES threads walk along K, each with AT_ONCE times VEC elements
    of every row at a time, so that x is read once for all rows, sums stay in a thread's registers until the end, and threads
    meet once. K and the rows' strides are given in units of VEC, which tells the compiler that vectors do not straddle.

    With GATED w has N more rows, and y = F(product, that with the other rows).

    Bytes are in flight either because STAGES steps go through shared memory, or because a thread asks for AT_ONCE vectors of
    each row before it multiplies the first."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    K = k_vectors * VEC
    # [ROWS, TOKENS, AT_ONCE, LANES, VEC]
    vector = tl.arange(0, AT_ONCE)[None, None, :, None, None] * LANES + tl.arange(0, LANES)[None, None, None, :, None]
    k = vector * VEC + tl.arange(0, VEC)[None, None, None, None, :]
    STEP: tl.constexpr = AT_ONCE * LANES
    steps = tl.cdiv(k_vectors, STEP)
    each = tl.cdiv(steps, SPLIT)
    first = tl.program_id(1) * each
    last = min(first + each, steps)
    start = first.to(tl.int64) * STEP * VEC
    w = w_ptr + (n % N).to(tl.int64)[:, None, None, None, None] * (w_row * VEC) + (start + k) * w_col
    x = x_ptr + (m % M).to(tl.int64)[None, :, None, None, None] * (x_row * VEC) + (start + k) * x_col
    left = K - start
    up = w + N.to(tl.int64) * (w_row * VEC) if GATED else w
    acc = tl.zeros([ROWS, TOKENS, LANES], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS, LANES], tl.float32)
    for _ in tl.range(first, last, num_stages=STAGES):
        if EVEN_K:
            w_tile = tl.load(w, eviction_policy="evict_first")
            if GATED:
                up_tile = tl.load(up, eviction_policy="evict_first")
            x_tile = tl.load(x, eviction_policy="evict_last")
        else:
            w_tile = tl.load(w, mask=k < left, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_tile = tl.load(up, mask=k < left, other=0.0, eviction_policy="evict_first")
            x_tile = tl.load(x, mask=k < left, other=0.0, eviction_policy="evict_last")
        acc += tl.sum(tl.sum(w_tile.to(tl.float32) * x_tile, axis=4), axis=2)
        if GATED:
            acc_up += tl.sum(tl.sum(up_tile.to(tl.float32) * x_tile, axis=4), axis=2)
            up += STEP * VEC * w_col
        w += STEP * VEC * w_col
        x += STEP * VEC * x_col
        left -= STEP * VEC
    y = tl.sum(acc, axis=2)
    if GATED:
        y = F(y, tl.sum(acc_up, axis=2), y_ptr.dtype.element_ty == tl.float32)
    store_rows(y_ptr, bias_ptr, bias_col, y, m, n, M, N, tl.program_id(1), HAS_BIAS)


@triton.jit
def sum_of_outer_products(
    dy_ptr, x_ptr, dw_ptr, N, K, dy_row, dy_col, x_row, x_col,
    M: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw [N, K], row-major. A program has ROWS rows and BLOCK_K columns; neighbouring programs lie beside one another."""
    across = tl.cdiv(K, BLOCK_K)
    n = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) % across * BLOCK_K + tl.arange(0, BLOCK_K)
    dy = dy_ptr + n.to(tl.int64) * dy_col
    x = x_ptr + k.to(tl.int64) * x_col
    acc = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for _ in tl.static_range(M):
        left = tl.load(dy, mask=n < N, other=0.0).to(tl.float32)
        acc += left[:, None] * tl.load(x, mask=k < K, other=0.0).to(tl.float32)[None, :]
        dy += dy_row
        x += x_row
    at = dw_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(at, acc.to(dw_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def shared_limit(sm: int) -> int:
    return SHARED_LIMIT.get(sm, min(SHARED_LIMIT.values())) - 2048  # what the compiler keeps for itself


def heuristic(sm: int, dtype: torch.dtype, m: int, n: int, k: int) -> Config:
    """Sums are split where rows of w are too few to fill the machine.

    For one row a program of four warps takes one row of w, 4 KB of it at a time, and nothing else: the hardware hands out the
    next program where one has ended, so no multiprocessor waits for another's share. An H200 took in bf16 120.9 µs for 128256 x
    2048, 28.3 for 4096 x 14336, 4.1 for 2048 x 2048; with eight warps 218, 31.8 and 5.3."""
    if INTERPRETING:
        return _config(4, 2, 1, 1, 2) if m == 1 else _config(16, 2, 1, 2)
    if m == 1:
        step = 4 * 32 * 16 // dtype.itemsize
        return _config(1, max(1, FILLS // n), 4, 1, min(2, bucket(-(-k // step))))
    rows = 8 if n >= 8192 and dtype != torch.float32 else 4
    return _config(rows, max(1, FILLS * rows // n), 4, 3)


def _config(rows: int, split: int, warps: int, stages: int, at_once: int = 1) -> Config:
    return {"ROWS": rows, "SPLIT": split, "AT_ONCE": at_once, "num_warps": warps, "num_stages": stages}


def candidates(sm: int, dtype: torch.dtype, m: int, n: int, k: int) -> Iterator[Config]:
    splits = tuple(s for s in (1, 2, 4) if s == 1 or s * n <= 8192)
    for c in grid_of({"ROWS": (1, 2, 4, 8, 16), "SPLIT": splits, "num_warps": (2, 4, 8), "num_stages": (1, 3, 5)}):
        shared = (c["ROWS"] + m) * c["num_warps"] * 512 * c["num_stages"]
        if c["ROWS"] * m <= 32 and (c["num_stages"] == 1 or shared <= shared_limit(sm) // 2):
            yield {**c, "AT_ONCE": 1}
    for c in grid_of({"ROWS": (1, 2, 4), "SPLIT": splits, "AT_ONCE": (2, 4, 8), "num_warps": (1, 2, 4, 8, 16)}):
        asked = (c["ROWS"] + m) * c["AT_ONCE"] * 16
        if asked <= ASKED and c["AT_ONCE"] * c["num_warps"] * 512 <= k * dtype.itemsize:
            yield {**c, "num_stages": 1}


GATED_ROW = _config(1, 1, 4, 1)  # 28672 x 4096 of gate and up in 54.7 µs on an H200; with twice as much at a time 56.3
configuration = Configurations(__file__, "skinny_matmul", heuristic, candidates)


def vector_length(*tensors: Tensor) -> int:
    """Elements of up to 16 bytes that rows of all tensors can be cut into: 1 where they are not contiguous."""
    length = 16 // tensors[0].element_size()
    for t in tensors:
        if t.stride(1) != 1:
            return 1
        while t.shape[1] % length or t.stride(0) % length:
            length //= 2
    return length if pointer_aligned(*tensors) else 1


def plan(x: Tensor, w: Tensor, bias: Tensor | None, activation: Activation = NONE) -> Plan | SplitPlan:
    """Of ``(x, w, bias, y)`` into a new row-major y [M, N] of x's dtype; without a bias any tensor is passed for it. A gated
    activation's w has 2N rows, and no bias."""
    (m, k), n = x.shape, w.shape[0] // (2 if activation.gated else 1)
    config = GATED_ROW if activation.gated else configuration(x.device, x.dtype, bucket(m), bucket(n), bucket(k))
    vec, tokens, lanes = vector_length(x, w), bucket(m), config["num_warps"] * 32
    step = config["AT_ONCE"] * lanes * vec
    split = 1 if activation.gated else parts_of(config["SPLIT"], triton.cdiv(k, step))
    strides = (x.stride(0) // vec, x.stride(1), w.stride(0) // vec, w.stride(1), 0 if bias is None else bias.stride(0))
    tile = {**constants_of(config), "SPLIT": split, "TOKENS": tokens, "LANES": lanes, "STAGES": config["num_stages"]}
    constants = {**tile, "VEC": vec, "EVEN_K": k % step == 0, "HAS_BIAS": bias is not None,
                 "GATED": activation.gated, "F": activation.forward}  # fmt: skip
    grid = (triton.cdiv(n, config["ROWS"]), split, triton.cdiv(m, tokens))
    products = Plan(skinny_vector, grid, (m, n, k // vec, *strides), constants, config["num_warps"], 1)
    return in_parts(products, split, m * n)


def outer_plan(dy: Tensor, x: Tensor) -> Plan:
    """Of ``(dy, x, dw)``, dw row-major."""
    (m, n), k = dy.shape, x.shape[1]
    rows, block = (16, 32) if INTERPRETING else (8, 2048 // x.element_size())
    grid = (triton.cdiv(n, rows) * triton.cdiv(k, block),)
    tile = {"M": m, "ROWS": rows, "BLOCK_K": block}
    return Plan(sum_of_outer_products, grid, (n, k, *dy.stride(), *x.stride()), tile)
