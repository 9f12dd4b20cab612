"""The ladder of the histogram: what each rung of ``histogram.cu`` changes, and how it is launched."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan, pointer_aligned
from weft.operators.launch import multiprocessors
from weft.operators.memory_access.histogram import BINS
from weft.operators.memory_access.histogram import histogram as operator

SOURCE = Path(__file__).parent / "histogram.cu"
THREADS = 256
BLOCKS = 6  # a multiprocessor: as many as have 32 KiB of shared memory each

RUNGS = {
    1: ("global-atomics", "all threads add to the same 256 words in L2"),
    2: ("shared-memory", "a histogram for each block, added at the end"),
    3: ("vectors", "16 bytes an access"),
    4: ("copies", "a histogram for each warp: warps do not meet"),
    5: ("lanes", "32 copies, one in each bank: lanes of a warp never meet, whatever the data"),
}


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(x) -> y`` of a contiguous fp32 x."""

    def histogram(x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise Declined("the ladder's kernels take a contiguous fp32 tensor")
        if number >= 3 and not pointer_aligned(x):
            raise Declined("16-byte accesses need a tensor that begins on 16 bytes")
        y = torch.zeros(BINS, dtype=torch.int32, device=x.device)
        if x.numel():
            blocks = min(BLOCKS * multiprocessors(x.device), -(-x.numel() // (4 * THREADS)))
            kernel = "ladder_global" if number == 1 else f"ladder_shared<{number}>"
            CudaPlan(SOURCE, kernel, (blocks, 1), THREADS, (ctypes.c_longlong(x.numel()),))(x, y)
        return y

    return histogram


for _number, (_name, _idea) in RUNGS.items():
    operator.rung(
        _number, _name, idea=_idea, backend="cuda", arch=">=sm_80", directions=("forward",), dtypes=("fp32",)
    )(rung(_number))
