"""The ladder of attention, forward, in Triton: what each rung changes, and how it is launched.

What each is predicted to gain, counted, and what it gained is in docs/notes/attention-ladder.md.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Declined
from weft.operators.attention.attention import attention as operator
from weft.operators.launch import INTERPRETING, DescriptorPlan, Plan, Plans

# B batch, H heads of q, G heads of k and v, S queries, T keys, D head dim; M queries and N keys of a tile
RUNGS = {
    1: ("standard", "three kernels: all scores to memory in fp32, softmax of each row, probabilities times v"),
    2: ("online-softmax", "one kernel: a program owns 64 queries and walks all keys; scores never leave the chip"),
    3: ("skipped-tiles", "tiles of keys that causal hides are not visited, those that all rows see are not masked"),
    4: ("base-2", "scale · log2(e) once, into the exponent: a multiply-add and an ex2 for a score"),
    5: ("pipelined", "cp.async brings two tiles of k and v ahead while one is multiplied"),
    6: (
        "longest-first",
        "of 16 heads together the rows with most keys start first, so that the last programs are short",
    ),
    7: ("descriptors", "TMA fetches tiles by descriptor: no thread computes addresses of k and v"),
}
SIZES = ["heads", "group", "S", "T"]  # one compilation for all lengths


# ---- rung 1: standard attention -------------------------------------------------------------------------------------------


@triton.jit
def tile(ptr, first, rows, ROWS: tl.constexpr, D: tl.constexpr):
    """[ROWS, D] of a contiguous [rows, D], 0 behind its end."""
    row, col = first + tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    return tl.load(ptr + row * D + col, mask=row < rows, other=0.0)


@triton.jit(do_not_specialize=SIZES)
def ladder_scores(
    q_ptr, k_ptr, s_ptr, heads, group, S, T, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """s_ptr [B, H, S, T], fp32: scale · q kᵀ, -inf where the key is behind the query. One program computes M × N."""
    across = tl.cdiv(T, N)
    m, n = tl.program_id(0) // across * M, tl.program_id(0) % across * N
    head = tl.program_id(1).to(tl.int64)
    q = tile(q_ptr + head * S * D, m, S, M, D)
    k = tile(k_ptr + head // group * T * D, n, T, N, D)
    s = tl.dot(q, tl.trans(k)) * scale
    i, j = m + tl.arange(0, M)[:, None], n + tl.arange(0, N)[None, :]
    if CAUSAL:
        s = tl.where(j <= i + T - S, s, float("-inf"))
    tl.store(s_ptr + head * S * T + i.to(tl.int64) * T + j, s, mask=(i < S) & (j < T))


@triton.jit(do_not_specialize=["T"])
def ladder_rows(s_ptr, p_ptr, T, BLOCK: tl.constexpr):
    """p_ptr [B, H, S, T]: the softmax of each row of s_ptr; zeros for a row that sees nothing."""
    j = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * T + j
    s = tl.load(s_ptr + at, mask=j < T, other=float("-inf"))
    peak = tl.max(s, 0)
    e = tl.exp(s - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(e, 0)
    p = e / tl.where(total == 0.0, 1.0, total)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=j < T)


@triton.jit(do_not_specialize=SIZES)
def ladder_values(
    p_ptr, v_ptr, o_ptr, heads, group, S, T, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """o_ptr [B, H, S, D] = p v. One program computes M rows."""
    m, head = tl.program_id(0) * M, tl.program_id(1).to(tl.int64)
    i = m + tl.arange(0, M)[:, None]
    acc = tl.zeros([M, D], tl.float32)
    for n in range(0, T, N):
        j = n + tl.arange(0, N)[None, :]
        p = tl.load(p_ptr + head * S * T + i.to(tl.int64) * T + j, mask=(i < S) & (j < T), other=0.0)
        acc = tl.dot(p, tile(v_ptr + head // group * T * D, n, T, N, D), acc)
    d = tl.arange(0, D)[None, :]
    tl.store(o_ptr + head * S * D + i * D + d, acc.to(o_ptr.dtype.element_ty), mask=i < S)


# ---- rungs 2 to 7: the online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) -----------------------------------


@triton.jit
def walk(
    acc, total, peak, q, k_ptr, v_ptr, k_tiles, v_tiles, first, stop, i, S, T, scale, N: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BASE_2: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """The tiles of N keys from ``first`` to ``stop``: output [M, D] and sum [M] relative to the largest score so far."""
    for n in range(first, stop, N):
        k = k_tiles.load([n, 0]) if DESCRIPTORS else tile(k_ptr, n, T, N, D)
        s = tl.dot(q, tl.trans(k))
        if not BASE_2:
            s *= scale
        if MASKED:
            j = n + tl.arange(0, N)[None, :]
            seen = j < T
            if CAUSAL:
                seen &= j <= i + T - S
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(peak, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
        if BASE_2:
            unit = scale * 1.4426950408889634
            p = tl.exp2(s * unit - (safe * unit)[:, None])
            shrink = tl.exp2((peak - safe) * unit)
        else:
            p = tl.exp(s - safe[:, None])
            shrink = tl.exp(peak - safe)
        v = v_tiles.load([n, 0]) if DESCRIPTORS else tile(v_ptr, n, T, N, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        peak = new
    return acc, total, peak


@triton.jit(do_not_specialize=SIZES)
def ladder_online(
    q_ptr, k_ptr, v_ptr, o_ptr, heads, group, S, T, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, SKIPS: tl.constexpr, BASE_2: tl.constexpr, LONGEST_FIRST: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """o_ptr [B, H, S, D]. A program makes M rows of one head; query i has the position i + T - S among the keys."""
    down = tl.cdiv(S, M)
    head, slot = tl.program_id(0) // down, tl.program_id(0) % down
    if LONGEST_FIRST:  # 16 heads, since k and v of all do not fit in L2
        first = tl.program_id(0) // (16 * down) * 16
        width = tl.minimum(heads - first, 16)
        within = tl.program_id(0) - first * down
        head, slot = first + within % width, down - 1 - within // width
    m, head = slot * M, head.to(tl.int64)
    i = m + tl.arange(0, M)[:, None]
    q = tile(q_ptr + head * S * D, m, S, M, D)
    k_ptr += head // group * T * D
    v_ptr += head // group * T * D
    k_tiles, v_tiles = k_ptr, v_ptr
    if DESCRIPTORS:
        k_tiles = tl.make_tensor_descriptor(k_ptr, [T, D], [D, 1], [N, D])
        v_tiles = tl.make_tensor_descriptor(v_ptr, [T, D], [D, 1], [N, D])
    acc, total = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    end, inner = T, 0
    if SKIPS:
        inner = T
        if CAUSAL:
            inner = tl.minimum(tl.maximum(m + T - S + 1, 0), T)  # keys that the first row sees
            end = tl.minimum(tl.maximum(m + M + T - S, 0), T)  # … and the last one
        inner = inner // N * N
        acc, total, peak = walk(
            acc, total, peak, q, k_ptr, v_ptr, k_tiles, v_tiles, 0, inner, i, S, T, scale, N, D,
            False, CAUSAL, BASE_2, DESCRIPTORS,
        )  # fmt: skip
    acc, total, peak = walk(
        acc, total, peak, q, k_ptr, v_ptr, k_tiles, v_tiles, inner, end, i, S, T, scale, N, D,
        True, CAUSAL, BASE_2, DESCRIPTORS,
    )  # fmt: skip
    o = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(o_ptr + head * S * D + i * D + tl.arange(0, D)[None, :], o.to(o_ptr.dtype.element_ty), mask=i < S)


# ---- launches ----------------------------------------------------------------------------------------------------------------


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(q, k, v, causal=, scale=) -> o``, arguments as for ``weft.ops.attention``.

    It declines what the kernels leave out for the sake of reading: every other option, head dims that are no power of two,
    strided tensors, and before the online softmax more keys than a row in registers has.
    """
    plans = Plans(lambda q, k, v, causal, scale: _plan(number, q, k, v, causal, scale))

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, **rest: Any
    ) -> Tensor:
        if more := sorted(
            name for name, given in rest.items() if isinstance(given, Tensor) or given not in (None, False, 0.0)
        ):
            raise Declined(f"the ladder's kernels take causal and scale alone, not {', '.join(more)}")
        o = torch.empty_like(q)
        if not k.shape[2]:
            return o.zero_()
        if o.numel():
            plans.of((q, k, v), causal, scale)(q, k, v, o)
        return o

    return attention


class ThreeKernels:
    """Rung 1, with the scores and probabilities that lie in memory between its kernels. Call it with (q, k, v, o)."""

    def __init__(self, scores: Plan, rows: Plan, values: Plan, shape: tuple[int, ...]):
        self.scores, self.rows, self.values, self.shape = scores, rows, values, shape

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        s = torch.empty(self.shape, dtype=torch.float32, device=q.device)
        p = torch.empty(self.shape, dtype=q.dtype, device=q.device)
        self.scores(q, k, s)
        self.rows(s, p)
        self.values(p, v, o)


def _plan(number: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Any:
    if not (q.ndim == 4 and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        raise Declined("the ladder's kernels take contiguous [B, heads, S, D]")
    b, h, queries, d = q.shape
    groups, keys = k.shape[1:3]
    if v.shape[3] != d or d not in (16, 32, 64, 128):
        raise Declined(f"head dims {d} and {v.shape[3]}; the ladder's kernels take one of 16, 32, 64, 128")
    if max(queries, keys) * d >= 2**31 or b * h >= 2**16:
        raise Declined(
            f"{b * h} heads, {queries} queries, {keys} keys; grids and a head's elements are counted in 32 bits"
        )
    scale = d**-0.5 if scale is None else float(scale)
    if number >= 4 and scale <= 0:
        raise Declined(f"a scale of {scale}; where it enters after the maximum it must be positive")
    sizes, m, n = (b * h, h // groups, queries, keys), *((32, 32) if INTERPRETING else (64, 64))
    tiles: dict[str, Any] = {"M": m, "N": n, "D": d}
    down = triton.cdiv(queries, m)
    if number == 1:
        if keys > 2**15:
            raise Declined(f"{keys} keys; a row of at most {2**15} is held in registers")
        block = triton.next_power_of_2(keys)
        return ThreeKernels(
            Plan(ladder_scores, (down * triton.cdiv(keys, n), b * h), (*sizes, scale), {**tiles, "CAUSAL": causal}),
            Plan(ladder_rows, (b * h * queries,), (keys,), {"BLOCK": block}, 8 if block > 2048 else 4),
            Plan(ladder_values, (down, b * h), sizes, tiles, num_stages=1),
            (b, h, queries, keys),
        )
    flags = {"CAUSAL": causal, "SKIPS": number >= 3, "BASE_2": number >= 4, "LONGEST_FIRST": number >= 6}
    made = DescriptorPlan if number == 7 else Plan
    constants = {**tiles, **flags, "DESCRIPTORS": number == 7}
    return made(ladder_online, (down * b * h,), (*sizes, scale), constants, 4, 3 if number >= 5 else 1)


for _number, (_name, _idea) in RUNGS.items():
    operator.rung(
        _number, _name, idea=_idea, backend="triton", arch=">=sm_90" if _number == 7 else ">=sm_80",
        dtypes=("bf16", "fp16"), directions=("forward",),
    )(rung(_number))  # fmt: skip
