"""The ladder of transpose: what each rung of ``transpose.cu`` changes, and how it is launched."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import Plans
from weft.operators.transpose.dispatch import TransposeCall, no_vectors
from weft.operators.transpose.transpose import result_like
from weft.operators.transpose.transpose import transpose as operator

SOURCE = Path(__file__).parent / "transpose.cu"
SIDE = 64  # of a tile in the upper rungs, elements

RUNGS = {
    1: ("naive", "one thread an element: reads are coalesced, writes take a sector an element"),
    2: ("shared-memory", "a tile turns round in shared memory: both sides coalesced, but its columns lie in one bank"),
    3: ("padded", "rows of the tile one word longer: a column lies in 32 banks"),
    4: ("vectors", "16 bytes an access on all sides; blocks of 16 x 16 bytes are transposed in registers"),
    5: ("swizzled", "vectors change places by exclusive or: eight lanes meet all 32 banks"),
    6: ("evict-last", "a hint to L2 on every read: give up written lines before read ones"),
    7: ("grouped", "blocks that run at the same time cover a square: longer runs in memory on the writing side"),
}


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(x) -> y``. It declines what the kernel leaves out for the sake of reading: batches,
    strided rows, and for the upper rungs sizes that are no multiples of 16 bytes."""
    plans = Plans(lambda x: _plan(number, x))

    def transpose(x: Tensor, dim0: int = -2, dim1: int = -1) -> Tensor:
        y = result_like(x)
        if y.numel():
            plans.of((x,))(x, y)
        return y

    return transpose


def _plan(number: int, x: Tensor) -> CudaPlan:
    if x.ndim != 2 or not x.is_contiguous():
        raise Declined("the ladder's kernels take one contiguous matrix")
    (m, n), dtype = x.shape, CTYPES[x.dtype]
    sizes = (ctypes.c_longlong(m), ctypes.c_longlong(n))
    if number <= 3:
        rows = 8 if number == 1 else 32
        if -(-m // rows) > 65535:
            raise Declined(f"{m} rows; a grid's second axis has 65535 blocks of {rows}")
        padding = 4 // x.element_size() if number == 3 else 0
        kernel = f"ladder_naive<{dtype}>" if number == 1 else f"ladder_tile<{dtype}, {padding}>"
        return CudaPlan(SOURCE, kernel, (-(-n // 32), -(-m // rows)), 256, sizes)
    if reason := no_vectors(TransposeCall(x)):
        raise Declined(reason)
    tiles_m, tiles_n = -(-m // SIDE), -(-n // SIDE)
    across = SIDE * x.element_size() // 16
    kernel = f"ladder_vectors<{dtype}, {SIDE}, {str(number >= 5).lower()}, {str(number >= 6).lower()}>"
    group = ctypes.c_int(64 // x.element_size() if number >= 7 else 1)
    return CudaPlan(SOURCE, kernel, (tiles_m * tiles_n, 1), across * across, (*sizes, group))


for _number, (_name, _idea) in RUNGS.items():
    operator.rung(
        _number, _name, idea=_idea, backend="cuda", arch=">=sm_80", devices=("cuda",), directions=("forward",)
    )(rung(_number))
