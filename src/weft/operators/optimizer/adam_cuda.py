"""The table of pointers with the launch of ``adam.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from pathlib import Path

from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import multiprocessors
from weft.operators.optimizer.cuda_table import CudaTable
from weft.operators.optimizer.entry import Entry

SOURCE = Path(__file__).with_name("adam.cu")
THREADS, BLOCKS = 512, 2  # of a block; blocks of a multiprocessor, of which one reads while the other begins a tensor
STAGES, TOLD = 3, 64  # passes that a thread has room for; bytes of what a block's threads are told of two tensors


class AdamTable(CudaTable):
    """Of Adam and AdamW; weight, gradient and moments of one dtype."""

    @staticmethod
    def why_not(entry: Entry) -> str:
        if {entry.gradient, *(s.dtype for s in entry.states)} != {entry.param.dtype}:
            return "weights, gradients and moments of several dtypes; the kernel is compiled for one"
        if entry.rounding != "nearest":
            return f"weights rounded by '{entry.rounding}'"
        return "AMSGrad" if entry.options["amsgrad"] else ""

    @staticmethod
    def form(entry: Entry) -> Hashable:
        return entry.param.dtype

    def kernel(self, chunks: int, asked: bool = False) -> CudaPlan:
        return CudaPlan(
            SOURCE,
            f"adam{'_asked' * asked}<{CTYPES[self.like.param.dtype]}, {THREADS}, {STAGES}>",
            (min(BLOCKS * multiprocessors(self.device), chunks), 1),
            THREADS,
            (ctypes.c_int64(chunks), ctypes.c_int64(self.block)),
            shared_bytes=STAGES * THREADS * 64 + TOLD,
        )
