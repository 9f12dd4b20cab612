"""``shared_memory_access(x, stride)``: reads out of shared memory by lanes ``stride`` elements apart, some of which collide."""

import collections
import ctypes
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.definition import Cost, Mutant, Operator, Workload, workload
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plan
from weft.operators.memory_access.machine import BANKS, Machine
from weft.operators.memory_access.pattern import LARGEST, THREADS, Pattern, call, define, implement

SOURCE = Path(__file__).parent / "shared_memory.cu"
TILE, READS = 1024, 8


def reference(x: Tensor, stride: int = 1, reads: int = READS) -> Tensor:
    tiles = -(-len(x) // TILE)
    padded = torch.nn.functional.pad(x, (0, tiles * TILE - len(x)), value=-torch.inf).view(tiles, TILE)
    at = torch.arange(TILE, device=x.device) * stride
    best = padded[:, at % TILE]
    for r in range(1, reads):
        best = torch.maximum(best, padded[:, (at + r) % TILE])
    return best.flatten()[: len(x)].contiguous()


@triton.jit
def tile_maxima(x_ptr, y_ptr, n, stride, TILE: tl.constexpr, READS: tl.constexpr):
    """Within each tile of TILE elements: y[t] = max over r < READS of x[(t * stride + r) % TILE]; one program a tile.

    Triton decides itself what lies in shared memory: this one gathers from L1, which is the same memory.
    """
    first = tl.program_id(0).to(tl.int64) * TILE
    t = tl.arange(0, TILE)
    best = tl.full([TILE], -float("inf"), tl.float32)
    for r in tl.static_range(READS):
        at = first + (t * stride + r) % TILE
        best = tl.maximum(best, tl.load(x_ptr + at, mask=at < n, other=-float("inf")).to(tl.float32))
    tl.store(y_ptr + first + t, best.to(y_ptr.dtype.element_ty), mask=first + t < n)


def triton_plan(x: Tensor, stride: int) -> Plan:
    tile = {"TILE": TILE, "READS": READS}
    return Plan(tile_maxima, (triton.cdiv(x.numel(), TILE),), (x.numel(), stride), tile, THREADS // 32)


def cuda_plan(x: Tensor, stride: int) -> CudaPlan:
    kernel = f"shared_strided<{CTYPES[x.dtype]}, {TILE}, {READS}>"
    scalars = (ctypes.c_longlong(x.numel()), ctypes.c_int(stride))
    return CudaPlan(SOURCE, kernel, (triton.cdiv(x.numel(), TILE), 1), THREADS, scalars)


def cost(w: Workload, direction: str) -> Cost:
    size = w["N"] * w.bytes_per_element
    return Cost(reads=size, writes=size, vector_flops=(READS - 1) * w["N"])


def conflict_degree(stride: int, bytes_per_element: int) -> int:
    """How many different words of one bank the 32 lanes of a warp want: so many cycles an access takes. Lanes that want
    the same word share it."""
    words = {lane * stride * bytes_per_element // 4 for lane in range(32)}
    return max(collections.Counter(word % BANKS for word in words).values())


def predicted_share(w: Workload, machine: Machine) -> float:
    """The longer of the time in memory and the time in shared memory, which overlap."""
    memory = 2 * w.bytes_per_element / machine.memory
    cycles = READS * conflict_degree(w.option("stride", 1), w.bytes_per_element) / 32
    return memory / max(memory, cycles / (machine.multiprocessors * machine.clock))


pattern = Pattern("shared_memory_access", reference, triton_plan, cuda_plan, option=("stride", range(1, 33), 1))

shared_memory_access = Operator(
    **define(
        pattern,
        cost=cost,
        verify=[
            *(workload(N=2048, stride=stride) for stride in (2, 3, 31, 32)),
            workload(N=1500, stride=5),
            workload(N=1500, values="large"),
        ],
        bench=[workload(N=LARGEST, stride=stride) for stride in (1, 2, 3, 4, 8, 16, 32)],
        huge=workload("bf16", N=2**31 + 17),
        wrong=[
            Mutant("stride ignored", lambda x, stride=1: reference(x, 1)),
            Mutant("one read fewer", lambda x, stride=1: reference(x, stride, READS - 1)),
        ],
        predicted=predicted_share,
    )
)
implement(shared_memory_access, pattern)


@shared_memory_access.function
def shared_memory_access_function(x: Tensor, stride: int = 1) -> Tensor:
    """Maxima of eight elements of a tile, read by lanes ``stride`` elements apart.

    Args:
        x: [N], without NaN; float32, float16 or bfloat16.
        stride: elements from one lane's to the next lane's, 1 … 32.

    Returns:
        [N]: within each tile of 1024, ``y[t] = max over r < 8 of x[(t * stride + r) % 1024]``; elements beyond x count as -inf.

    Raises:
        TypeError: x is not a tensor of those dtypes, or stride not an int.
        ValueError: x has not one dimension, or stride is out of range.
    """
    return call(pattern, x, stride)
