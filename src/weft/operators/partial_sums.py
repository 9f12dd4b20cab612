"""The second stage of a sum over programs: adds the partial sums that they have written, in a fixed order."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import bucket
from weft.operators.launch import Plan

WIDE = 2**18  # columns above which there are programs enough, whatever their tile


@triton.jit
def sum_partials(partial_ptr, out_ptr, P, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[s, n] = sum over p of partial[s, p, n] in fp32, always in the same order."""
    col = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    partial_ptr += tl.program_id(1).to(tl.int64) * P * N
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        p = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (p[:, None] < P) & (col[None, :] < N)
        total += tl.load(partial_ptr + p[:, None] * N + col[None, :], mask=inside, other=0.0)
    out_ptr += tl.program_id(1).to(tl.int64) * N
    tl.store(out_ptr + col, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=col < N)


def plan(parts: int, n: int, sets: int = 1) -> Plan:
    """Of ``(partial, out)``: fp32 [sets, parts, n] → [sets, n], both contiguous. Narrow tiles where there are few columns:
    the parts are then read by more programs, each many rows at a time. Wide ones where the columns are a matrix's elements."""
    block = 1024 if n > WIDE else 64 if n >= 16384 else 32 if n >= 4096 else 16
    rows = min(max(bucket(parts), 1 if n > WIDE else 16), 8192 // block)
    return Plan(sum_partials, (triton.cdiv(n, block), sets), (parts, n), {"ROWS": rows, "BLOCK": block}, 8)


class SummedPlan:
    """A launch that ends in two sets of partial sums, fp32 [parts, n], and the launch that adds them up into the last tensor,
    [sets, n]. Call it with the other tensors of the launch and then that. With no ``sets`` nothing is summed."""

    def __init__(self, launch: Callable[..., None], parts: int, n: int, sets: int):
        self.launch, self.sets = launch, sets
        self.shape = (max(sets, 1), parts, n if sets else 1)
        self.total = plan(parts, n, max(sets, 1))

    def __call__(self, *tensors: Tensor) -> None:
        *read, sums = tensors
        partial = torch.empty(self.shape, dtype=torch.float32, device=sums.device)
        self.launch(*read, partial[0], partial[-1])
        if self.sets:
            self.total(partial, sums)


class SplitPlan:
    """A product whose sums over K are divided among programs: ``products`` into fp32 [split, elements], then their sum. Call it
    with the operands and the result, which comes last."""

    def __init__(self, products: Plan, split: int, elements: int):
        self.products, self.shape = products, (split, elements)
        self.total = plan(split, elements)

    def __call__(self, *tensors: Tensor) -> None:
        *operands, y = tensors
        parts = torch.empty(self.shape, dtype=torch.float32, device=y.device)
        self.products(*operands, parts)
        self.total(parts, y)


def in_parts(products: Plan, split: int, elements: int) -> Plan | SplitPlan:
    """The launches of a product with ``elements`` results, of which each is split into so many sums."""
    return products if split == 1 else SplitPlan(products, split, elements)


def parts_of(wanted: int, steps: int) -> int:
    """How many parts of whole steps a sum has, at most ``wanted``, none of them empty."""
    each = -(-steps // max(min(wanted, steps), 1))
    return max(-(-steps // max(each, 1)), 1)
