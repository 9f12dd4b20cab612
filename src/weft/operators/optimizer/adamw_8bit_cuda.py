"""The table of pointers with the launch of ``adamw_8bit.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from pathlib import Path

from torch import Tensor

from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import multiprocessors
from weft.operators.optimizer import map_cells
from weft.operators.optimizer.adam_rule import is_decoupled
from weft.operators.optimizer.cuda_table import CudaTable
from weft.operators.optimizer.entry import Entry
from weft.operators.optimizer.rule import Rule

SOURCE = Path(__file__).with_name("adamw_8bit.cu")
TABLES = 2 * 2**16  # bytes that look-ups of the dynamic map take, a block of threads
THREADS = 512  # two teams of warps that keep together; 128 registers hold what the next pass wants too


class CodedTable(CudaTable):
    """Of AdamW whose moments are both in 8 bits; blocks of one size and format."""

    def __init__(self, rule: Rule, entries: Sequence[Entry], groups: int = 1, control: Tensor | None = None):
        super().__init__(rule, entries, groups, control)
        self.constants = (map_cells.tables(self.made),)

    @staticmethod
    def why_not(entry: Entry) -> str:
        if entry.codes is None:
            return "moments that are not in 8 bits"
        if not is_decoupled(entry.options):
            return "Adam's weight decay, which is added to the gradient"
        if entry.gradient != entry.param.dtype:
            return "weights and gradients of several dtypes; the kernel is compiled for one"
        if entry.rounding != "nearest":
            return f"weights rounded by '{entry.rounding}'"
        if entry.options["amsgrad"]:
            return "AMSGrad"
        return "codes that are rounded stochastically" if entry.codes.stochastic else ""

    @staticmethod
    def form(entry: Entry) -> Hashable:
        assert entry.codes is not None  # of a weight that is taken
        return entry.param.dtype, entry.codes.block, entry.codes.format

    def kernel(self, chunks: int, asked: bool = False) -> CudaPlan:
        entry, codes = self.like, self.like.codes
        assert codes is not None  # of a weight that is taken
        dynamic = codes.format == "dynamic"
        kind = CTYPES[entry.param.dtype], "DYNAMIC" if dynamic else "E4M3", codes.block, THREADS
        return CudaPlan(
            SOURCE,
            f"adamw_8bit{'_asked' * asked}<{', '.join(map(str, kind))}>",
            (min(multiprocessors(self.device), chunks), 1),
            THREADS,
            (ctypes.c_int64(chunks), ctypes.c_int64(self.block)),
            shared_bytes=dynamic * TABLES + THREADS // 32 * 16 + 16,
        )
