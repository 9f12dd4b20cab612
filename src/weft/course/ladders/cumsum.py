"""The ladder of the running sum of one long row: what each rung of ``cumsum.cu`` changes, and how it is launched."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan, pointer_aligned
from weft.operators.scan.cumsum import cumsum as operator

SOURCE = Path(__file__).parent / "cumsum.cu"
THREADS = 256
VECTORS = 16  # of 16 bytes a thread of the last rung; with 4 tiles look back so far that rung 6 is faster

RUNGS = {
    1: ("doubling", "y[i] += y[i - d] for d = 1, 2, 4 …: n log n additions, and as many passes over memory"),
    2: (
        "tiles",
        "the doubling in shared memory, tile by tile; the tiles' sums are scanned alike and added: 4 n elements moved",
    ),
    3: ("tree", "up a tree and down again: 2 n additions, by ever fewer threads and with bank conflicts"),
    4: ("warp-shuffle", "five steps in registers; shared memory carries one value a warp"),
    5: ("vectors", "four neighbours a thread, one access"),
    6: ("reduce-first", "only the tiles' sums are written before the scan: 3 n"),
    7: ("look-back", "a tile adds the published sums of those before it: one pass, 2 n"),
}


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(x) -> y``, inclusive, of a contiguous fp32 tensor with one row."""

    def cumsum(x: Tensor, dim: int = -1, exclusive: bool = False, reverse: bool = False) -> Tensor:
        if x.dtype != torch.float32 or not x.is_contiguous() or not x.numel() or x.shape[dim] != x.numel():
            raise Declined("the ladder's kernels take one contiguous row of fp32")
        if exclusive or reverse:
            raise Declined("the ladder's kernels are inclusive and start at the front")
        if number >= 5 and not pointer_aligned(x):
            raise Declined("16-byte accesses need a tensor that begins on 16 bytes")
        y = torch.empty_like(x)
        if number == 1:
            return _doubling(x, y)
        if number == 7:
            return _look_back(x, y)
        return _tiles(number, x, y)

    return cumsum


def _plan(kernel: str, blocks: int, *sizes: int) -> CudaPlan:
    scalars: Any = [ctypes.c_longlong(size) for size in sizes]
    return CudaPlan(SOURCE, kernel, (blocks, 1), THREADS, scalars)


def _doubling(x: Tensor, y: Tensor) -> Tensor:
    n, d, other = x.numel(), 1, torch.empty_like(x)
    _plan("ladder_doubling", -(-n // THREADS), n, d)(x, y)
    while (d := 2 * d) < n:
        _plan("ladder_doubling", -(-n // THREADS), n, d)(y, other)
        y, other = other, y
    return y


def _tiles(number: int, x: Tensor, y: Tensor) -> Tensor:
    n, each = x.numel(), 4 if number >= 5 else 1
    blocks = -(-n // (THREADS * each))
    sums = x.new_empty(blocks)
    if number == 6 and blocks > 1:
        _plan("ladder_sums", blocks, n)(x, sums)
        _plan("ladder_scan", blocks, n)(x, _tiles(number, sums, sums), y)
        return y
    _plan("ladder_vectors" if number >= 5 else f"ladder_tiles<{number}>", blocks, n)(x, y, sums)
    if blocks > 1:
        _plan(f"ladder_add<{each}>", blocks, n)(_tiles(number, sums, sums), y)
    return y


def _look_back(x: Tensor, y: Tensor) -> Tensor:
    n = x.numel()
    tiles = -(-n // (THREADS * 4 * VECTORS))
    state = torch.zeros(tiles + 1, dtype=torch.int64, device=x.device)  # of each tile flag and value; tiles drawn
    _plan(f"ladder_look_back<{VECTORS}>", tiles, n)(x, y, state, state[tiles:])
    return y


for _number, (_name, _idea) in RUNGS.items():
    operator.rung(
        _number, _name, idea=_idea, backend="cuda", arch=">=sm_80", directions=("forward",), dtypes=("fp32",)
    )(rung(_number))
