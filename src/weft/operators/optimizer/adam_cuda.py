"""The table of pointers with the launch of ``adam.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import multiprocessors
from weft.operators.optimizer.cuda_table import CudaTable
from weft.operators.optimizer.table import Entry

SOURCE = Path(__file__).with_name("adam.cu")
THREADS, BLOCKS = 512, 2  # of a block; blocks of a multiprocessor, of which one reads while the other begins a tensor
STAGES, TOLD = 3, 64  # passes that a thread has room for; bytes of what a block's threads are told of two tensors


class AdamTable(CudaTable):
    """Of Adam and AdamW, weights, gradients and moments all of one dtype."""

    @staticmethod
    def why_not(entries: Sequence[Entry]) -> str:
        dtype = entries[0].param.dtype
        if any({e.param.dtype, e.gradient, *(s.dtype for s in e.states)} != {dtype} for e in entries):
            return "weights, gradients and moments of several dtypes; the kernel is compiled for one"
        return "AMSGrad" if any(e.options["amsgrad"] for e in entries) else ""

    def kernel(self, chunks: int) -> CudaPlan:
        return CudaPlan(
            SOURCE,
            f"adam<{CTYPES[self.entries[0].param.dtype]}, {THREADS}, {STAGES}>",
            (min(BLOCKS * multiprocessors(self.device), chunks), 1),
            THREADS,
            (ctypes.c_int64(chunks), ctypes.c_int64(self.block)),
            shared_bytes=STAGES * THREADS * 64 + TOLD,
        )
