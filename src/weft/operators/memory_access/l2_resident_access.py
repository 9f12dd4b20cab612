"""``l2_resident_access(x, passes)``: x read over and over: from L2 as long as it fits there, from memory when it does not."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Workload, workload
from weft.operators.launch import Plan
from weft.operators.memory_access.machine import Machine
from weft.operators.memory_access.pattern import LARGEST, Pattern, call, define, implement

PART = 4096  # elements


def reference(x: Tensor, passes: int = 4) -> Tensor:
    if rest := -len(x) % PART:
        x = torch.nn.functional.pad(x, (0, rest), value=-torch.inf)
    return torch.stack([x.view(-1, PART).amax(1) for _ in range(passes)])


def result(x: Tensor, passes: int) -> Tensor:
    return torch.empty((passes, -(-x.numel() // PART)), dtype=x.dtype, device=x.device)


@triton.jit
def part_maxima(x_ptr, y_ptr, n, parts, PART: tl.constexpr):
    """y[pass, part] = max of x[part * PART …], n elements in all; grid passes * parts. Past L1, whose 256 KiB would answer."""
    part = tl.program_id(0) % parts
    i = part.to(tl.int64) * PART + tl.arange(0, PART)
    x = tl.load(x_ptr + i, mask=i < n, other=-float("inf"), cache_modifier=".cg")
    tl.store(y_ptr + tl.program_id(0), tl.max(x, 0))


def plan(x: Tensor, passes: int) -> Plan:
    """Blocks start in order, so passes follow each other; a part is read by another multiprocessor in each."""
    parts = triton.cdiv(x.numel(), PART)
    return Plan(part_maxima, (passes * parts,), (x.numel(), parts), {"PART": PART}, 8)


def cost(w: Workload, direction: str) -> Cost:
    """Compulsory is one pass: what the others cost is the question. Bytes a second as the program sees them are the
    share of the ceiling times the passes."""
    n, passes = w["N"], w.option("passes", 4)
    size = w.bytes_per_element
    return Cost(reads=n * size, writes=passes * -(-n // PART) * size, vector_flops=passes * n)


def predicted_share(w: Workload, machine: Machine) -> float:
    """The first pass comes from memory, the others from L2 if x fits there; else all come from memory: a sweep over more than
    a cache holds has always just thrown away what it needs next."""
    again = machine.memory / machine.l2_rate if w["N"] * w.bytes_per_element <= machine.l2 else 1.0
    return 1 / (1 + (w.option("passes", 4) - 1) * again)


def _last_pass_missed(x: Tensor, passes: int = 4) -> Tensor:
    y = reference(x, passes)
    y[-1] = 0
    return y


pattern = Pattern("l2_resident_access", reference, plan, option=("passes", range(1, 4097), 4), result=result)

l2_resident_access = Operator(
    **define(
        pattern,
        cost=cost,
        sizes=(1, 2, 4095, 4097, 9000),
        verify=[*(workload(N=5000, passes=passes) for passes in (1, 3, 7)), workload(N=5000, values="large")],
        bench=[workload("fp32", N=2**k, passes=LARGEST >> k) for k in range(18, 27)],  # 1 MiB … 256 MiB
        huge=workload("bf16", N=2**31 + 17, passes=1),
        wrong=[
            Mutant("a part left out", lambda x, passes=4: reference(x[: max(len(x) - 1, 0)], passes)),
            Mutant("last pass missed", _last_pass_missed),
        ],
        predicted=predicted_share,
    )
)
implement(l2_resident_access, pattern, compiled=False)  # a compiler sees that passes are alike, and reads once


@l2_resident_access.function
def l2_resident_access_function(x: Tensor, passes: int = 4) -> Tensor:
    """Maxima of every 4096 elements of x, taken ``passes`` times.

    Args:
        x: [N], without NaN; float32, float16 or bfloat16.
        passes: how often x is read, 1 … 4096.

    Returns:
        [passes, ceil(N / 4096)]; all rows are alike.

    Raises:
        TypeError: x is not a tensor of those dtypes, or passes not an int.
        ValueError: x has not one dimension, or passes is out of range.
    """
    return call(pattern, x, passes)
