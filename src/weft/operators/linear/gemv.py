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
from weft.operators.launch import INTERPRETING, Plan, starts_early, wait_for_predecessor
from weft.operators.linear.activations import NONE, Activation
from weft.operators.partial_sums import SplitPlan, in_parts, parts_of

# M rows of x, N rows of w, K columns of both
MOST_ROWS = 2  # of x; of more, cuBLAS was measured to be as fast or faster
FILLS = 96  # programs of four warps or more that keep a machine's memory busy: most have 84 to 170 multiprocessors
LONGEST_ROW = 8192  # bytes of x that a program holds in registers
PROGRAMS = 512  # that take several rows of w each
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
def read(ptr, inside, WHOLE: tl.constexpr, POLICY: tl.constexpr):
    if WHOLE:
        return tl.load(ptr, eviction_policy=POLICY)
    else:
        return tl.load(ptr, mask=inside, other=0.0, eviction_policy=POLICY)


@triton.jit
def skinny_vector(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr,
    M, N, k_vectors, x_row, x_col, w_row, w_col, bias_col, norm_col, residual_row, residual_col, eps,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, VEC: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, ONE_STEP: tl.constexpr, AHEAD: tl.constexpr, F: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes ROWS rows of w and TOKENS of x. All its LANES threads walk along K, each with AT_ONCE times VEC elements
    of every row at a time, so that x is read once for all rows, sums stay in a thread's registers until the end, and threads
    meet once. K and the rows' strides are given in units of VEC, which tells the compiler that vectors do not straddle.

    y = F(product), or with GATED, where w has N more rows, F(product, that with the other rows). With NORM the product is
    that of rms_norm(x): a program adds up x's squares beside its products and divides these at the end.

    AHEAD: each step asks for the next step's w before it multiplies, and the first step's is asked for before anything that
    another kernel writes. That takes more registers, so fewer programs are there at once."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    K = k_vectors * VEC
    # [ROWS, TOKENS, AT_ONCE, LANES, VEC]
    vector = tl.arange(0, AT_ONCE)[None, None, :, None, None] * LANES + tl.arange(0, LANES)[None, None, None, :, None]
    k = vector * VEC + tl.arange(0, VEC)[None, None, None, None, :]
    STEP: tl.constexpr = AT_ONCE * LANES * VEC
    steps = tl.cdiv(K, STEP)
    each = tl.cdiv(steps, SPLIT)
    first = tl.program_id(1) * each
    last = min(first + each, steps)
    start = first.to(tl.int64) * STEP
    w = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None, None, None, None] * (w_row * VEC) + (start + k) * w_col
    x = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :, None, None, None] * (x_row * VEC) + (start + k) * x_col
    g = norm_ptr + (start + k) * norm_col if NORM else x
    left = K - start
    up = w + N.to(tl.int64) * (w_row * VEC) if GATED else w
    inside = (n[:, None] < N) & (m[None, :] < M)
    part = tl.program_id(1)
    if AHEAD:
        w_tile = read(w, k < left, EVEN_K, "evict_first")
        up_tile = read(up, k < left, EVEN_K, "evict_first") if GATED else w_tile
        g_tile = read(g, k < left, EVEN_K, "evict_last") if NORM else w_tile
    if HAS_BIAS:
        b = bias_ptr + n.to(tl.int64) * bias_col
        bias = tl.load(b, mask=(n < N) & (part == 0), other=0.0).to(tl.float32)
        up_bias = tl.load(b + N.to(tl.int64) * bias_col, mask=n < N, other=0.0).to(tl.float32) if GATED else bias
    wait_for_predecessor(EARLY)
    if RESIDUAL:
        at = residual_ptr + m.to(tl.int64)[None, :] * residual_row + n.to(tl.int64)[:, None] * residual_col
        residual = tl.load(at, mask=inside & (part == 0), other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, TOKENS, LANES], tl.float32)
    acc_up = tl.zeros([ROWS, TOKENS, LANES], tl.float32)
    squares = tl.zeros([1, TOKENS, LANES], tl.float32)
    if not AHEAD:
        for _ in tl.range(first, last, num_stages=1):
            w_tile = read(w, k < left, EVEN_K, "evict_first")
            up_tile = read(up, k < left, EVEN_K, "evict_first") if GATED else w_tile
            x_tile = read(x, k < left, EVEN_K, "evict_last").to(tl.float32)
            acc += tl.sum(tl.sum(w_tile.to(tl.float32) * x_tile, axis=4), axis=2)
            if GATED:
                acc_up += tl.sum(tl.sum(up_tile.to(tl.float32) * x_tile, axis=4), axis=2)
                up += STEP * w_col
            w += STEP * w_col
            x += STEP * x_col
            left -= STEP
    elif not ONE_STEP:
        for _ in tl.range(first, last - 1, num_stages=1):
            w += STEP * w_col
            left -= STEP
            w_next = read(w, k < left, EVEN_K, "evict_first")
            if GATED:
                up += STEP * w_col
                up_next = read(up, k < left, EVEN_K, "evict_first")
            x_tile = tl.load(x, eviction_policy="evict_last").to(tl.float32)
            if NORM:
                squares += tl.sum(tl.sum(x_tile * x_tile, axis=4), axis=2)
                x_tile *= g_tile.to(tl.float32)
                g += STEP * norm_col
                g_tile = read(g, k < left, EVEN_K, "evict_last")
            acc += tl.sum(tl.sum(w_tile.to(tl.float32) * x_tile, axis=4), axis=2)
            w_tile = w_next
            if GATED:
                acc_up += tl.sum(tl.sum(up_tile.to(tl.float32) * x_tile, axis=4), axis=2)
                up_tile = up_next
            x += STEP * x_col
    if AHEAD:
        x_tile = read(x, k < left, EVEN_K, "evict_last").to(tl.float32)
        if NORM:
            squares += tl.sum(tl.sum(x_tile * x_tile, axis=4), axis=2)
            x_tile *= g_tile.to(tl.float32)
        acc += tl.sum(tl.sum(w_tile.to(tl.float32) * x_tile, axis=4), axis=2)
        if GATED:
            acc_up += tl.sum(tl.sum(up_tile.to(tl.float32) * x_tile, axis=4), axis=2)
    y = tl.sum(acc, axis=2)
    up_sum = tl.sum(acc_up, axis=2) if GATED else y
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=2) / K + eps)
        y *= scale
        up_sum *= scale
    if HAS_BIAS:
        y += bias[:, None]
        up_sum += up_bias[:, None]
    PRECISE: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    if F is not None:
        y = F(y, up_sum, PRECISE) if GATED else F(y, PRECISE)
    if RESIDUAL:
        y += residual
    store_rows(y_ptr, w_ptr, 0, y, m, n, M, N, part, False)


@triton.jit(do_not_specialize=["groups"])
def row_vector(
    x_ptr, w_ptr, bias_ptr, norm_ptr, residual_ptr, y_ptr,
    groups, M, N, k_vectors, x_row, x_col, w_row, w_col, bias_col, norm_col, residual_row, residual_col, eps,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, AT_ONCE: tl.constexpr, VEC: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, F: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The same where x's rows fit into a program's registers: it reads them once, normalises them, and then takes ``groups``
    times ROWS rows of w, each time asking for the next ones before it multiplies."""
    n = tl.program_id(0) * (ROWS * groups) + tl.arange(0, ROWS)
    m = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    K = k_vectors * VEC
    # [ROWS, TOKENS, AT_ONCE, LANES, VEC]
    vector = tl.arange(0, AT_ONCE)[None, None, :, None, None] * LANES + tl.arange(0, LANES)[None, None, None, :, None]
    k = vector * VEC + tl.arange(0, VEC)[None, None, None, None, :]
    column = w_ptr + k * w_col
    step = w_row * VEC
    inside = k < K
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None, None, None, None]
    w_tile = read(column + row * step, inside, EVEN_K, "evict_first")
    up_tile = read(column + (row + N) * step, inside, EVEN_K, "evict_first") if GATED else w_tile
    if NORM:
        g = read(norm_ptr + k * norm_col, inside, EVEN_K, "evict_last").to(tl.float32)
    wait_for_predecessor(EARLY)
    x = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[None, :, None, None, None] * (x_row * VEC) + k * x_col
    x_tile = read(x, inside, EVEN_K, "evict_last").to(tl.float32)
    if NORM:
        squares = tl.sum(tl.sum(tl.sum(x_tile * x_tile, axis=4), axis=2), axis=2)
        x_tile *= tl.rsqrt(squares / K + eps)[:, :, None, None, None] * g
    PRECISE: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    for i in tl.range(0, groups, num_stages=1):
        stored = (n[:, None] < N) & (m[None, :] < M)
        at = n.to(tl.int64)
        if RESIDUAL:
            r = residual_ptr + m.to(tl.int64)[None, :] * residual_row + at[:, None] * residual_col
            residual = tl.load(r, mask=stored, other=0.0).to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + at * bias_col, mask=n < N, other=0.0).to(tl.float32)
            up_bias = tl.load(bias_ptr + (at + N) * bias_col, mask=n < N, other=0.0).to(tl.float32) if GATED else bias
        n += ROWS
        row = tl.minimum(n, N - 1).to(tl.int64)[:, None, None, None, None]
        more = inside & (i + 1 < groups)
        w_next = tl.load(column + row * step, mask=more, other=0.0, eviction_policy="evict_first")
        if GATED:
            up_next = tl.load(column + (row + N) * step, mask=more, other=0.0, eviction_policy="evict_first")
        y = tl.sum(tl.sum(tl.sum(w_tile.to(tl.float32) * x_tile, axis=4), axis=2), axis=2)
        w_tile = w_next
        if GATED:
            up_sum = tl.sum(tl.sum(tl.sum(up_tile.to(tl.float32) * x_tile, axis=4), axis=2), axis=2)
            up_tile = up_next
        if HAS_BIAS:
            y += bias[:, None]
        if GATED and HAS_BIAS:
            up_sum += up_bias[:, None]
        if F is not None:
            y = F(y, up_sum, PRECISE) if GATED else F(y, PRECISE)
        if RESIDUAL:
            y += residual
        to = y_ptr + m.to(tl.int64)[None, :] * N + at[:, None]
        tl.store(to, y.to(y_ptr.dtype.element_ty), mask=stored)


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


def plan(
    x: Tensor, w: Tensor, bias: Tensor | None, activation: Activation = NONE, norm: Tensor | None = None,
    residual: Tensor | None = None, eps: float = 0.0, config: Config | None = None,
) -> Plan | SplitPlan:  # fmt: skip
    """Of ``(x, w, bias, norm, residual, y)`` into a new row-major y [M, N] of x's dtype; any tensor is passed for what there is
    not. A gated activation's w and bias have 2N rows."""
    (m, k), n = x.shape, w.shape[0] // (2 if activation.gated else 1)
    vec, tokens = vector_length(x, w), bucket(m)
    strides: tuple[int, ...] = (x.stride(0) // vec, x.stride(1), w.stride(0) // vec, w.stride(1))
    strides += (0 if bias is None else bias.stride(0), 0 if norm is None else norm.stride(0))
    strides += (0, 0) if residual is None else residual.stride()
    early = starts_early(x.device)
    more = norm is not None or residual is not None
    config = config or chosen(x, n, k, activation, more)
    lanes = config["num_warps"] * 32
    step = config["AT_ONCE"] * lanes * vec
    known = {"TOKENS": tokens, "LANES": lanes, "VEC": vec, "EVEN_K": k > 0 and k % step == 0, "HAS_BIAS": bias is not None,
             "NORM": norm is not None, "RESIDUAL": residual is not None, "GATED": activation.gated,
             "F": None if activation is NONE else activation.forward, "EARLY": early}  # fmt: skip
    scalars, across = (m, n, k // vec, *strides, float(eps)), triton.cdiv(m, tokens)
    if groups := config.get("groups", 0):
        grid = (triton.cdiv(n, config["ROWS"] * groups), 1, across)
        constants = {**constants_of(config), **known}
        return Plan(row_vector, grid, (groups, *scalars), constants, config["num_warps"], 1, early)
    split = 1 if activation is not NONE or norm is not None else parts_of(config["SPLIT"], triton.cdiv(k, step))
    constants = {**constants_of(config), **known, "SPLIT": split, "ONE_STEP": k <= step, "AHEAD": more or early}
    grid = (triton.cdiv(n, config["ROWS"]), split, across)
    products = Plan(skinny_vector, grid, scalars, constants, config["num_warps"], 1, early)
    return in_parts(products, split, m * n)


def groups_of(rows: int, groups: int, warps: int, at_once: int) -> Config:
    """Of ``row_vector``."""
    return {"ROWS": rows, "groups": groups, "AT_ONCE": at_once, "num_warps": warps, "num_stages": 1}


def chosen(x: Tensor, n: int, k: int, activation: Activation, more: bool) -> Config:
    """With a norm or a residual (``more``) a program holds a row that fits into its registers, and takes many rows of w; else
    it takes one row of w (:func:`heuristic`), with them 2 KB of a longer one at a time, since the next step's are in flight
    too: 29.6 µs for 4096 x 14336 in bf16, with 4 KB a step 31.1."""
    size = k * x.element_size()
    if not more or size > LONGEST_ROW or x.shape[0] > 1 or INTERPRETING:
        if activation.gated:
            return GATED_ROW
        config = configuration(x.device, x.dtype, bucket(x.shape[0]), bucket(n), bucket(k))
        return {**config, "AT_ONCE": 1} if more and x.shape[0] == 1 and size > LONGEST_ROW else config
    warps = min(max(bucket(-(-size // 512)), 4), 8)
    at_once = bucket(-(-size // (512 * warps)))
    rows = 1 if activation.gated and at_once > 1 else 2
    return groups_of(rows, min(max(round(n / (rows * PROGRAMS)), 1), 32), warps, at_once)


def outer_plan(dy: Tensor, x: Tensor) -> Plan:
    """Of ``(dy, x, dw)``, dw row-major."""
    (m, n), k = dy.shape, x.shape[1]
    rows, block = (16, 32) if INTERPRETING else (8, 2048 // x.element_size())
    grid = (triton.cdiv(n, rows) * triton.cdiv(k, block),)
    tile = {"M": m, "ROWS": rows, "BLOCK_K": block}
    return Plan(sum_of_outer_products, grid, (n, k, *dy.stride(), *x.stride()), tile)
