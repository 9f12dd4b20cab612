"""The ladder of the sum of all elements: what each rung of ``sum.cu`` changes, and how it is launched."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan, pointer_aligned
from weft.operators.launch import Plans, multiprocessors
from weft.operators.reduction.sum import sum as operator

SOURCE = Path(__file__).parent / "sum.cu"
THREADS = 256
BLOCKS = 8  # a multiprocessor: 2,048 threads, all that it holds

RUNGS = {
    1: (
        "interleaved",
        "a tree in shared memory whose every second, fourth … thread adds: warps diverge, all stay busy",
    ),
    2: ("strided", "the first threads add, so whole warps leave; but their words lie in few banks"),
    3: ("sequential", "neighbouring threads add neighbouring words: no conflicts"),
    4: ("first-add", "two elements a thread, added while they are loaded: half the blocks"),
    5: ("last-warp", "the last 32 lanes shuffle, without barriers"),
    6: ("grid-stride", "as many blocks as the GPU holds: a thread adds hundreds of elements before the only tree"),
    7: ("vectors", "16 bytes an access and four sums a thread: more bytes in flight"),
    8: ("one-pass", "the last block to finish adds the partial sums: one launch"),
}


@dataclass
class Launches:
    """One launch after another, each on the partial sums of the one before."""

    plans: list[CudaPlan]

    def __call__(self, x: Tensor) -> Tensor:
        for plan in self.plans:
            y = x.new_empty(plan.grid[0])
            plan(x, y)
            x = y
        return x


@dataclass
class OnePass:
    plan: CudaPlan
    ticket: Tensor  # how many blocks have finished; 0 between launches, so of one stream at a time

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(1)
        self.plan(x, x.new_empty(self.plan.grid[0]), y, self.ticket)
        return y


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(x) -> y``, of all elements of a contiguous fp32 tensor."""
    plans = Plans(lambda x: _plan(number, x))

    def sum(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
            raise Declined("the ladder's kernels take a contiguous fp32 tensor that is not empty")
        if dim is not None and x.shape[dim] != x.numel():
            raise Declined("the ladder's kernels add up everything")
        if number >= 7 and not pointer_aligned(x):
            raise Declined("16-byte accesses need a tensor that begins on 16 bytes")
        shape = () if dim is None else x.select(dim, 0).shape
        shape = x.sum(dim, keepdim).shape if keepdim else shape
        return plans.of((x,))(x).view(shape)

    return sum


def _plan(number: int, x: Tensor) -> Launches | OnePass:
    resident, n = BLOCKS * multiprocessors(x.device), x.numel()

    def plan(kernel: str, blocks: int) -> CudaPlan:
        return CudaPlan(SOURCE, kernel, (blocks, 1), THREADS, (ctypes.c_longlong(n),))

    if number == 8:
        blocks = min(resident, -(-n // (4 * THREADS)))
        return OnePass(plan("ladder_one_pass", blocks), torch.zeros(1, dtype=torch.int32, device=x.device))
    plans: list[CudaPlan] = []
    while not plans or n > 1:
        if number >= 6:
            blocks = min(resident, -(-n // (4 * THREADS)))
            plans.append(plan(f"ladder_grid<{str(number == 7).lower()}>", blocks))
        else:
            blocks = -(-n // (THREADS * (2 if number >= 4 else 1)))
            plans.append(plan(f"ladder_tree<{number}>", blocks))
        n = blocks
    return Launches(plans)


for _number, (_name, _idea) in RUNGS.items():
    operator.rung(
        _number, _name, idea=_idea, backend="cuda", arch=">=sm_80", directions=("forward",), dtypes=("fp32",)
    )(rung(_number))
