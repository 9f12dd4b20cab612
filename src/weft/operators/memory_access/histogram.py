"""``histogram(x)``: how often elements fall into each of 256 bins: scattered additions, on which threads meet."""

import ctypes
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Workload, workload
from weft.operators.cuda import CudaPlan, pointer_aligned
from weft.operators.launch import Plan, multiprocessors
from weft.operators.memory_access.pattern import LARGEST, OPTIONS, THREADS, Pattern, call, define, implement
from weft.operators.random_inputs import random_tensor

BINS = 256
BLOCK = 2048  # elements that a program counts at a time
PROGRAMS = 8  # a multiprocessor
SOURCE = Path(__file__).parent / "histogram.cu"
BLOCKS = 6  # of the CUDA kernel, a multiprocessor


def reference(x: Tensor) -> Tensor:
    inside = x[(x >= 0) & (x <= 1)]
    return torch.bincount((inside * BINS).long().clamp(max=BINS - 1), minlength=BINS).int()


@triton.jit
def count_bins(x_ptr, y_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """y[b] += how many of x [n] have min(⌊BINS x⌋, BINS - 1) = b and 0 ≤ x ≤ 1. y is 0 before."""
    counts = tl.zeros([2 * BINS], tl.int32)  # what falls into no bin is counted in bin BINS
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=-1.0).to(tl.float32)
        inside = (x >= 0) & (x <= 1)
        b = tl.minimum((tl.where(inside, x, 0.0) * BINS).to(tl.int32), BINS - 1)
        counts += tl.histogram(tl.where(inside, b, BINS), 2 * BINS)
    b = tl.arange(0, 2 * BINS)
    tl.atomic_add(y_ptr + b, counts, mask=b < BINS)


def plan(x: Tensor) -> Plan:
    programs = min(triton.cdiv(x.numel(), BLOCK), PROGRAMS * multiprocessors(x.device))
    return Plan(count_bins, (programs,), (x.numel(),), {"BINS": BINS, "BLOCK": BLOCK})


def cuda_plan(x: Tensor) -> CudaPlan:
    blocks = min(triton.cdiv(x.numel(), 4 * THREADS), BLOCKS * multiprocessors(x.device))
    return CudaPlan(SOURCE, "count_bins", (blocks, 1), THREADS, (ctypes.c_longlong(x.numel()),))


def cuda_declines(x: Tensor) -> str:
    if x.dtype != torch.float32 or not pointer_aligned(x):
        return "the CUDA kernel takes float32 that begins on 16 bytes"
    return ""


def result(x: Tensor) -> Tensor:
    return torch.zeros(BINS, dtype=torch.int32, device=x.device)


def inputs(w: Workload, g: Any, device: str) -> dict[str, Any]:
    """Uniform from 0 to 1; with ``values=same`` all elements fall into one bin."""
    values = w.option("values", "normal")
    layout, drawn = w.option("layout", "contiguous"), "normal" if values == "same" else values
    x = random_tensor(g, (w["N"],), w.dtype, device, layout=layout, values=drawn)
    if device == "meta" or values not in ("normal", "same"):
        return {"x": x}
    uniform = torch.special.ndtr(x.float())
    return {"x": x.copy_(uniform if values == "normal" else uniform / (2 * BINS))}


def cost(w: Workload, direction: str) -> Cost:
    return Cost(reads=w["N"] * w.bytes_per_element, writes=BINS * 4)


pattern = Pattern("histogram", reference, plan, cuda_plan, result=result, cuda_declines=cuda_declines)

histogram = Operator(
    **{
        **define(
            pattern,
            cost=cost,
            verify=[workload(N=5000, values=values) for values in ("same", "large", "nonfinite")],
            bench=[workload(N=LARGEST, values=values) for values in ("normal", "same")],
            huge=workload("bf16", N=2**31 + 17),
            wrong=[
                Mutant("last element left out", lambda x: reference(x[:-1])),
                Mutant("1 left out", lambda x: reference(x[x < 1])),
                Mutant("128 bins", lambda x: torch.cat([reference(x).view(-1, 2).sum(1), torch.zeros(128)]).int()),
            ],
        ),
        "inputs": inputs,
        "options": {**OPTIONS, "values": (*OPTIONS["values"], "same")},
    }
)
histogram.workloads = {**histogram.workloads, "ladder": [w.at("fp32") for w in histogram.workloads["bench"]]}
implement(histogram, pattern, lambda x: torch.histc(x.float(), BINS, 0, 1).int(), compiled=False)


@histogram.function
def histogram_function(x: Tensor) -> Tensor:
    """How often the elements of x fall into each of 256 bins from 0 to 1.

    Args:
        x: [N]; float32, float16 or bfloat16.

    Returns:
        [256] of int32: ``y[b]`` counts the elements from b / 256 to below (b + 1) / 256, 1 with the last bin. What lies
        outside, NaN too, is not counted. As ``torch.histc(x, 256, 0, 1)``.

    Raises:
        TypeError: x is not a tensor of those dtypes.
        ValueError: x has not one dimension.
    """
    return call(pattern, x)
