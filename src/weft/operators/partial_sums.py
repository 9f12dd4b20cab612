"""The second half of a sum that programs share: each has written its part, this adds the parts in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.operators.launch import Plan


@triton.jit
def sum_partials(partial_ptr, out_ptr, P, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = sum over p of partial[p, n] in fp32, always in the same order."""
    col = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        p = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (p[:, None] < P) & (col[None, :] < N)
        total += tl.load(partial_ptr + p[:, None] * N + col[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + col, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=col < N)


def plan(parts: int, n: int) -> Plan:
    """Of ``(partial, out)``: fp32 [parts, n] → [n], both contiguous."""
    return Plan(sum_partials, (triton.cdiv(n, 64),), (parts, n), {"ROWS": 32, "BLOCK": 64}, 4)
