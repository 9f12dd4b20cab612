"""The table of pointers with the launch of ``adamw_8bit.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import multiprocessors
from weft.operators.optimizer import map_cells
from weft.operators.optimizer.cuda_table import CudaTable
from weft.operators.optimizer.rule import Rule
from weft.operators.optimizer.table import Entry

SOURCE = Path(__file__).with_name("adamw_8bit.cu")
TABLES = 2 * 2**16  # bytes that look-ups of the dynamic map take, a block of threads


def threads(block: int) -> int:
    """Of a block of the grid: 640 have 96 registers, which hold what the next pass wants too. Where several warps share a block
    of codes it takes a few more, and warps are to be a multiple of 8."""
    return 640 if block <= 256 else 512


class CodedTable(CudaTable):
    """Of AdamW alone, its moments all in 8 bits, blocks of one size and format."""

    def __init__(self, rule: Rule, entries: Sequence[Entry]):
        super().__init__(rule, entries)
        self.constants = (map_cells.tables(self.made),)

    @staticmethod
    def why_not(entries: Sequence[Entry]) -> str:
        first = entries[0]
        for e in entries:
            if e.gradient != e.param.dtype or e.param.dtype != first.param.dtype:
                return "weights and gradients of several dtypes; the kernel is compiled for one"
            if e.codes is not None and e.codes.stochastic:
                return "codes that are rounded stochastically"
        return ""

    def kernel(self, chunks: int) -> CudaPlan:
        (entry, *_), codes = self.entries, self.entries[0].codes
        assert codes is not None  # whoever makes this table gives them
        dynamic = codes.format == "dynamic"
        count = threads(codes.block)
        kind = CTYPES[entry.param.dtype], "DYNAMIC" if dynamic else "E4M3", codes.block, count
        return CudaPlan(
            SOURCE,
            f"adamw_8bit<{', '.join(map(str, kind))}>",
            (min(multiprocessors(self.device), chunks), 1),
            count,
            (ctypes.c_int64(chunks), ctypes.c_int64(self.block)),
            shared_bytes=dynamic * TABLES + count // 32 * 16 + 16,
        )
