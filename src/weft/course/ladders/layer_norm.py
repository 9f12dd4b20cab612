"""The ladder of layer normalisation: what each rung of ``layer_norm.cu`` changes, and how it is launched."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from weft.definition import Declined
from weft.operators.cuda import CudaPlan, pointer_aligned
from weft.operators.launch import Plans
from weft.operators.normalization.layer_norm import EPS
from weft.operators.normalization.layer_norm import layer_norm as operator

SOURCE = Path(__file__).parent / "layer_norm.cu"
THREADS = 256
LONGEST = 8192  # columns that a block holds in registers

RUNGS = {
    1: ("naive", "one thread a row: the loads of a warp are N apart"),
    2: ("coalesced", "one block a row: neighbouring threads read neighbouring columns; trees in shared memory add"),
    3: ("warp-shuffle", "32 lanes add in registers: two barriers a sum instead of nine"),
    4: ("moments", "mean and variance in one pass (Chan's formula): two reads of a row instead of three"),
    5: ("registers", "the row stays in registers, 16 bytes an access: one read, and no division an element"),
}


def rung(number: int) -> Callable[..., Tensor]:
    """The function of one rung: ``(x, weight, bias, eps) -> y`` of fp32."""
    plans = Plans(lambda x, weight, bias, eps: _plan(number, x, weight, bias, eps))

    def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
        if weight is None or bias is None:
            raise Declined("the ladder's kernels take a weight and a bias")
        y = torch.empty_like(x)
        if y.numel():
            plans.of((x, weight, bias), eps)(x, weight, bias, y)
        return y

    return layer_norm


def _plan(number: int, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> CudaPlan:
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (x, weight, bias)):
        raise Declined("the ladder's kernels take contiguous fp32 tensors")
    n = x.shape[-1]
    m = x.numel() // n
    kernel = {1: "ladder_naive", 4: "ladder_moments"}.get(number, f"ladder_block<{number}>")
    if number == 5:
        if n % 4 or not pointer_aligned(x, weight, bias):
            raise Declined("16-byte accesses need rows that begin and end on 16 bytes")
        if n > LONGEST:
            raise Declined(f"{n} columns; a block holds {LONGEST} in registers")
        kernel = f"ladder_registers<{-(-n // (4 * THREADS))}>"
    scalars = (ctypes.c_longlong(m), ctypes.c_longlong(n), ctypes.c_float(eps))
    return CudaPlan(SOURCE, kernel, (-(-m // THREADS) if number == 1 else m, 1), THREADS, scalars)


for _number, (_name, _idea) in RUNGS.items():
    operator.rung(
        _number, _name, idea=_idea, backend="cuda", arch=">=sm_80", directions=("forward",), dtypes=("fp32",)
    )(rung(_number))
