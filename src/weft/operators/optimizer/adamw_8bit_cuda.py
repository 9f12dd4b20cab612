"""The table of pointers with the launch of ``adamw_8bit.cu`` in place of Triton's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.definition import Declined
from weft.operators.cuda import CTYPES, CudaPlan
from weft.operators.launch import multiprocessors
from weft.operators.optimizer import map_cells
from weft.operators.optimizer.rule import Rule
from weft.operators.optimizer.table import Entry, Table

SOURCE = Path(__file__).with_name("adamw_8bit.cu")
TABLES = 2 * 2**16  # bytes that look-ups of the dynamic map take, a block of threads


def threads(block: int) -> int:
    """Of a block of the grid: 640 have 96 registers, which hold what the next pass wants too. Where several warps share a block
    of codes it takes a few more, and warps are to be a multiple of 8."""
    return 640 if block <= 256 else 512


def why_not(entries: Sequence[Entry]) -> str:
    """Why the kernel does not take these parameters (an empty string where it does)."""
    first = entries[0]
    for e in entries:
        if e.gradient != e.param.dtype or e.param.dtype != first.param.dtype:
            return "weights and gradients of several dtypes; the kernel is compiled for one"
        if e.codes is not None and e.codes.stochastic:
            return "codes that are rounded stochastically"
    return ""


class CudaTable(Table):
    """Of AdamW alone, its moments all in 8 bits, blocks of one size and format.

    Raises:
        Declined: parameters that the kernel does not take.
    """

    def __init__(self, rule: Rule, entries: Sequence[Entry]):
        if reason := why_not(entries):
            raise Declined(reason)
        super().__init__(rule, entries)
        self.codebook = map_cells.tables(self.made)

    def _plan(self, chunks: int, scaled: bool, clipped: bool, guarded: bool, zeroed: bool) -> Callable[..., None]:
        if scaled or clipped or guarded or zeroed:
            raise Declined("a step that scales, clips, skips or zeroes gradients")
        if chunks not in self.plans:
            self.plans[chunks] = self._kernel(chunks)
        plan = self.plans[chunks]
        return lambda grads, table, places, numbers, arrivals, *unused: plan(
            grads, table, places, numbers, arrivals, self.codebook
        )

    def _kernel(self, chunks: int) -> CudaPlan:
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
