"""The launches of ``all_reduce.cu`` for one rank: where things lie in the buffers, grids, and what a call must be like."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.operators.cuda import CTYPES, CudaPlan, flags, pointer_aligned

SOURCE = Path(__file__).with_name("all_reduce.cu")
MOST_RANKS, MOST_BLOCKS = 8, 256  # as in all_reduce.cu
ALGORITHMS = ("one_shot_flagged", "one_shot", "two_shot")
FLAGS_END = 256 + 2 * MOST_BLOCKS * MOST_RANKS * 4  # bytes: the call's number, then flags of two meetings
UNIT = 16  # bytes of a thread's access
MOST_EACH = 4  # units a thread has of a row


class Peers(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64 * MOST_RANKS)]


class Layout(ctypes.Structure):
    _fields_ = [
        ("flagged", ctypes.c_int64),
        ("flagged_most", ctypes.c_int64),
        ("data", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("rank", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    ]


def buffer_bytes(ranks: int, most_bytes: int, flagged_bytes: int) -> int:
    """Bytes of each rank's buffer for calls of up to ``most_bytes``, flagged ones up to ``flagged_bytes``."""
    return FLAGS_END + 2 * ranks * (2 * flagged_bytes + most_bytes)


class Launches:
    """One rank's launches.

    Args:
        mine: this rank's buffer, uint8, zeros before the first call of any rank.
        bases: the address of each rank's buffer in this process.
        rank: this one's number among them.
        most_bytes: of a call; ``flagged_bytes``: of a flagged one. Multiples of 32.
    """

    def __init__(self, mine: Tensor, bases: Sequence[int], rank: int, most_bytes: int, flagged_bytes: int):
        if not 2 <= len(bases) <= MOST_RANKS:
            raise ValueError(f"{len(bases)} ranks; expected 2 to {MOST_RANKS} of one host")
        self.mine, self.ranks = mine, len(bases)
        self.most = {"one_shot_flagged": flagged_bytes, "one_shot": most_bytes, "two_shot": most_bytes}
        padded = [*bases, *[0] * (MOST_RANKS - len(bases))]
        self._peers = Peers((ctypes.c_uint64 * MOST_RANKS)(*padded))
        data = FLAGS_END + 2 * self.ranks * 2 * flagged_bytes
        self._layout = Layout(FLAGS_END, flagged_bytes, data, most_bytes, rank, 0)
        self._plan = functools.cache(self._made)
        self._rows = functools.cache(self._made_rows)

    def refused(self, algorithm: str, x: Tensor) -> str:
        """Why an algorithm does not take a tensor; empty where it does."""
        size = x.numel() * x.element_size()
        if x.dtype not in CTYPES:
            return f"dtype is {x.dtype}; expected fp32, fp16 or bf16"
        if not x.is_contiguous() or not pointer_aligned(x) or size % UNIT:
            return "the tensor is not contiguous, or does not begin and end on 16 bytes"
        if size > self.most[algorithm]:
            return f"{size:,} bytes; {algorithm} takes up to {self.most[algorithm]:,}"
        if algorithm == "two_shot" and size // UNIT % self.ranks:
            return f"{size:,} bytes do not divide into {self.ranks} parts of 16 bytes"
        return ""

    def __call__(self, algorithm: str, x: Tensor, out: Tensor, blocks: int = 0) -> None:
        """Queues one call on the current stream; ``out`` may be ``x``. All ranks make the same one.

        Args:
            blocks: the most that are launched (0: 128).

        Raises:
            ValueError: an algorithm that does not take this tensor.
        """
        if reason := self.refused(algorithm, x) or self.refused(algorithm, out):
            raise ValueError(f"symmetric all_reduce by {algorithm}: {reason}")
        if x.numel():
            units = x.numel() * x.element_size() // UNIT
            self._plan(algorithm, x.dtype, units, blocks)(x, out, self.mine)

    def _made(self, algorithm: str, dtype: torch.dtype, units: int, blocks: int) -> CudaPlan:
        block = 256 if units <= 4096 else 512
        each = 1 if algorithm == "one_shot_flagged" else 2
        of_rank = units // self.ranks if algorithm == "two_shot" else units
        grid = min(blocks or 128, max(-(-of_rank // (block * each)), 1), MOST_BLOCKS)
        scalars: list[Any] = [self._peers, self._layout, ctypes.c_int64(units)]
        return CudaPlan(SOURCE, f"{algorithm}<{CTYPES[dtype]}, {self.ranks}>", (grid, 1), block, scalars)

    def rows_refused(self, x: Tensor, flagged: bool) -> str:
        """Why :meth:`add_rms_norm` does not take ``x [rows, width]``; empty where it does."""
        width = x.shape[-1] * x.element_size()
        if width % UNIT or width > 1024 * MOST_EACH * UNIT:
            return f"a row of {width:,} bytes; expected a multiple of 16, up to {1024 * MOST_EACH * UNIT:,}"
        if not flagged and x.numel() // x.shape[-1] > MOST_BLOCKS:
            return f"{x.numel() // x.shape[-1]:,} rows; expected up to {MOST_BLOCKS}"
        return self.refused("one_shot_flagged" if flagged else "one_shot", x)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, hidden: Tensor, flagged: bool = True
    ) -> None:
        """``hidden`` = the sum of ``x`` + ``residual``, ``out`` = its RMSNorm times ``weight [width]``; all
        ``[rows, width]``. ``flagged``: by flags in the data, for few bytes."""
        if reason := self.rows_refused(x, flagged):
            raise ValueError(f"symmetric add_rms_norm: {reason}")
        if x.numel():
            rows, units = x.numel() // x.shape[-1], x.shape[-1] * x.element_size() // UNIT
            self._rows(x.dtype, rows, units, eps, flagged)(x, residual, weight, out, hidden, self.mine)

    def _made_rows(self, dtype: torch.dtype, rows: int, units: int, eps: float, flagged: bool) -> CudaPlan:
        block = min(1024, -(-units // 32) * 32)
        expression = f"add_rms_norm<{CTYPES[dtype]}, {self.ranks}, {-(-units // block)}, {flags(flagged)}>"
        scalars: list[Any] = [self._peers, self._layout, ctypes.c_int64(units), ctypes.c_float(eps)]
        return CudaPlan(SOURCE, expression, (rows, 1), block, scalars)
