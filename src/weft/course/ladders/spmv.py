"""The ladder of a sparse matrix times a vector: what each rung of ``spmv.cu`` changes, and how it is launched."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan
from weft.operators.sparse.csr import CSR
from weft.operators.sparse.spmv import spmv as operator

SOURCE = Path(__file__).parent / "spmv.cu"
THREADS = 256
PIECE = 8 * THREADS  # elements of a block in the last rungs

RUNGS = {
    1: ("scalar", "one thread a row: the loads of a warp are a row's length apart, and it waits for its longest row"),
    2: ("vector", "one warp a row: coalesced, but in rows of fewer than 32 elements most lanes idle"),
    3: ("fitted", "as many lanes a row as its mean length fills"),
    4: (
        "pieces",
        "equal shares of the elements, not of the rows: products in shared memory, then one thread a row adds",
    ),
    5: ("adaptive", "a piece of few, long rows gives each a warp"),
}


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(matrix, x) -> y`` in fp32 with int32 indices."""

    def spmv(matrix: CSR, x: Tensor) -> Tensor:
        m, offsets, columns, values = matrix.shape[0], matrix.row_offsets, matrix.columns, matrix.values
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise Declined("the ladder's kernels take a contiguous x in fp32")
        if not (offsets.dtype == columns.dtype == torch.int32):
            raise Declined("the ladder's kernels take int32 indices")
        y = x.new_zeros(m) if number >= 4 or not matrix.stored else x.new_empty(m)
        if y.numel() and matrix.stored:
            _plan(number, m, matrix.stored)(offsets, columns, values, x, y)
        return y

    return spmv


def _plan(number: int, m: int, stored: int) -> CudaPlan:
    mean = max(stored // m, 2)
    lanes = {1: 1, 2: 32}.get(number, min(32, 1 << mean.bit_length() - 1))
    if max(m * lanes, stored + PIECE) >= 2**31:
        raise Declined("the ladder's kernels count threads and elements in 32 bits")
    kernel = "ladder_scalar" if number == 1 else f"ladder_lanes<{lanes}>"
    blocks = -(-m * lanes // THREADS)
    if number >= 4:
        kernel, blocks = f"ladder_pieces<{str(number == 5).lower()}>", -(-stored // PIECE)
    return CudaPlan(SOURCE, kernel, (blocks, 1), THREADS, (ctypes.c_int(m),))


for _number, (_name, _idea) in RUNGS.items():
    operator.rung(
        _number, _name, idea=_idea, backend="cuda", arch=">=sm_80", directions=("forward",), dtypes=("fp32",)
    )(rung(_number))
