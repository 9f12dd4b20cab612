"""The ladder of softmax: what each rung of ``softmax.cu`` changes, and how it is launched.

Times are in docs/measured/softmax.md, predicted from the bytes that each rung moves and measured.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CTYPES, CudaPlan, pointer_aligned
from weft.operators.launch import Plans
from weft.operators.softmax.softmax import softmax as operator

SOURCE = Path(__file__).parent / "softmax.cu"
THREADS = 256
EACH = 16  # elements a thread holds in the last rungs: rows of up to 4096 columns

RUNGS = {
    1: ("naive", "one thread a row: the loads of a warp are N apart, 32 lines each"),
    2: (
        "coalesced",
        "one block a row: neighbouring threads read neighbouring columns; one thread adds up the partials",
    ),
    3: ("shared-memory", "a tree in shared memory: 8 steps instead of 255"),
    4: ("warp-shuffle", "32 lanes reduce in registers; shared memory carries one value a warp"),
    5: ("vectorised", "16 bytes an access instead of one element"),
    6: ("one-pass", "the row stays in registers: read once instead of three times"),
    7: ("cheap-arithmetic", "one division a row instead of one an element; for 16-bit results the hardware's ex2"),
    8: ("evict-last", "a hint to L2 on every read: give up written lines before read ones"),
}


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(x, dim) -> y``.

    It declines what the kernel leaves out for the sake of reading: other dimensions than the last, strided rows, and for
    the upper rungs rows that do not begin and end on 16 bytes or are longer than registers hold.
    """
    plans = Plans(lambda x, dim: _plan(number, x, dim))

    def softmax(x: Tensor, dim: int = -1) -> Tensor:
        y = torch.empty_like(x)
        if y.numel():
            plans.of((x,), dim)(x, y)
        return y

    return softmax


def _plan(number: int, x: Tensor, dim: int) -> CudaPlan:
    if dim % x.ndim != x.ndim - 1 or not x.is_contiguous():
        raise Declined("the ladder's kernels take the last dimension of a contiguous tensor")
    n = x.shape[-1]
    m = x.numel() // n
    if number >= 5 and (n * x.element_size() % 16 or not pointer_aligned(x)):
        raise Declined("16-byte accesses need rows that begin and end on 16 bytes")
    if number >= 6 and n > THREADS * EACH:
        raise Declined(f"{n} columns; {THREADS} threads hold {THREADS * EACH} in registers")
    dtype = CTYPES[x.dtype]
    kernel = {
        1: f"ladder_naive<{dtype}>",
        5: f"ladder_vectorised<{dtype}>",
        6: f"ladder_one_pass<{dtype}, {EACH}, false, false>",
        7: f"ladder_one_pass<{dtype}, {EACH}, true, false>",
        8: f"ladder_one_pass<{dtype}, {EACH}, true, true>",
    }
    grid = -(-m // THREADS) if number == 1 else m
    scalars = (ctypes.c_longlong(m), ctypes.c_longlong(n))
    return CudaPlan(SOURCE, kernel.get(number, f"ladder_block<{dtype}, {number}>"), (grid, 1), THREADS, scalars)


for _number, (_name, _idea) in RUNGS.items():
    operator.rung(
        _number, _name, idea=_idea, backend="cuda", arch=">=sm_80", devices=("cuda",), directions=("forward",)
    )(rung(_number))
