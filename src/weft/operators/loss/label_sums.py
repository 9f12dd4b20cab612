"""Sums over rows: how many labels count and what they weigh (the mean's divisors), and the rows' losses. Up to ``EACH`` rows
by one program; more by several, whose sums are then added: always in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.operators.configs import bucket
from weft.operators.launch import Plan

EACH = 16384  # that one program sums


@triton.jit
def sum_labels(
    target_ptr, weight_ptr, out_ptr, M, V, target_stride, weight_stride, ignore, m_each, v_each,
    HAS_WEIGHT: tl.constexpr, ALL_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[program] = (weights of the labels that count, their number, weights of all classes), each of a slice."""
    p = tl.program_id(0).to(tl.int64)
    weights = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.float32)
    everything = tl.zeros([BLOCK], tl.float32)
    for start in range(0, m_each, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = p * m_each + at
        inside = (at < m_each) & (row < M)
        label = tl.load(target_ptr + row * target_stride, mask=inside, other=ignore).to(tl.int64)
        counts = inside & (label != ignore)
        number += tl.where(counts, 1.0, 0.0)
        if HAS_WEIGHT:
            known = (label >= 0) & (label < V)
            w = tl.load(weight_ptr + label * weight_stride, mask=counts & known, other=0.0).to(tl.float32)
            weights += tl.where(counts, tl.where(known, w, float("nan")), 0.0)
    if ALL_WEIGHTS:
        for start in range(0, v_each, BLOCK):
            at = start + tl.arange(0, BLOCK)
            v = p * v_each + at
            inside = (at < v_each) & (v < V)
            everything += tl.load(weight_ptr + v * weight_stride, mask=inside, other=0.0).to(tl.float32)
    count = tl.sum(number, axis=0)
    tl.store(out_ptr + p * 3, tl.sum(weights, axis=0) if HAS_WEIGHT else count)
    tl.store(out_ptr + p * 3 + 1, count)
    tl.store(out_ptr + p * 3 + 2, tl.sum(everything, axis=0))


@triton.jit
def sum_slices(in_ptr, out_ptr, N, each, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """out[program, c] = sum of in[n, c] over a slice of N; c is the grid's second dimension."""
    p = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, each, BLOCK):
        at = start + tl.arange(0, BLOCK)
        n = p * each + at
        total += tl.load(in_ptr + n * COLUMNS + c, mask=(at < each) & (n < N), other=0.0)
    tl.store(out_ptr + p * COLUMNS + c, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


class Sum:
    """Of the rows of fp32 [N, C] (or [N]) into [C] (or [])."""

    def __init__(self, n: int, columns: int = 1):
        p = parts(n)
        self.steps = [_slices(n, columns, p)] if p > 1 else []
        self.steps.append(_slices(p if p > 1 else n, columns, 1))
        self.partial = (p, columns)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        for step in self.steps[:-1]:
            partial = torch.empty(self.partial, device=x.device, dtype=torch.float32)
            step(x, partial)
            x = partial
        self.steps[-1](x, out)


class LabelSums:
    """Of ``(target, weight)``: fp32 [3]: the weights of the labels that count, their number, the weights of all classes."""

    def __init__(self, target: Tensor, weight: Tensor, classes: int, ignore: int, has_weight: bool, all_weights: bool):
        m = target.shape[0]
        self.parts = max(parts(m), parts(classes) if all_weights else 1)
        each = (triton.cdiv(m, self.parts), triton.cdiv(classes, self.parts))
        scalars = (m, classes, target.stride(0), weight.stride(0), ignore, *each)
        flags = {"HAS_WEIGHT": has_weight, "ALL_WEIGHTS": all_weights, "BLOCK": block_of(max(each[0], 1))}
        self.first = Plan(sum_labels, (self.parts,), scalars, flags, 4)
        self.rest = Sum(self.parts, 3)

    def __call__(self, target: Tensor, weight: Tensor) -> Tensor:
        total = torch.empty(3, device=target.device, dtype=torch.float32)
        if self.parts == 1:
            self.first(target, weight, total)
            return total
        sums = torch.empty((self.parts, 3), device=target.device, dtype=torch.float32)
        self.first(target, weight, sums)
        self.rest(sums, total)
        return total


def parts(n: int) -> int:
    return max(1, min(triton.cdiv(n, EACH), 1024))


def block_of(n: int) -> int:
    return min(bucket(n, 128), 4096)


def _slices(n: int, columns: int, p: int) -> Plan:
    each = triton.cdiv(n, p)
    return Plan(sum_slices, (p, columns), (n, each), {"COLUMNS": columns, "BLOCK": block_of(each)}, 4)
