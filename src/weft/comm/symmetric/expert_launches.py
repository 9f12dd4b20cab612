"""The launches of ``expert_all_to_all.cu`` for one rank: where things lie in the buffers, and grids."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.comm.symmetric.launches import FLAGS_END, MOST_BLOCKS, MOST_RANKS, UNIT, Peers
from weft.operators.cuda import CTYPES, CudaPlan

SOURCE = Path(__file__).with_name("expert_all_to_all.cu")


class Places(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("experts", "weights", "rows", "returned", "most", "units")),
        ("rank", ctypes.c_uint32),
        ("k", ctypes.c_int),
        ("each", ctypes.c_int),
        ("pad", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Form:
    """Of all exchanges of one object: up to ``tokens`` tokens of ``width`` elements on each of ``ranks`` ranks, each for
    ``k`` of the ranks' experts, ``each`` a rank.

    Raises:
        ValueError: rows that are not of 16-byte units, another dtype, or ranks that do not divide the experts.
    """

    ranks: int
    tokens: int
    width: int
    k: int
    experts: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"{self.ranks} ranks; expected 2 to {MOST_RANKS} of one host")
        if self.dtype not in CTYPES:
            raise ValueError(f"dtype is {self.dtype}; expected fp32, fp16 or bf16")
        if self.tokens < 1 or not 1 <= self.k <= self.experts:
            raise ValueError(
                f"tokens is {self.tokens}, k {self.k} of {self.experts} experts; expected 1 or more, k of them"
            )
        if self.experts % self.ranks:
            raise ValueError(f"experts is {self.experts}; expected a multiple of {self.ranks} ranks")
        if self.row_bytes % UNIT:
            raise ValueError(
                f"width is {self.width} of {self.dtype}: {self.row_bytes} bytes; expected a multiple of {UNIT}"
            )

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def each(self) -> int:
        return self.experts // self.ranks

    @property
    def slots(self) -> int:
        return self.ranks * self.tokens

    @property
    def offsets(self) -> tuple[int, ...]:
        """Bytes from a buffer's beginning to experts, weights, rows, returned rows, and its end."""
        numbers = -(-self.slots * self.k * 4 // UNIT) * UNIT
        sizes = (FLAGS_END, numbers, numbers, self.slots * self.row_bytes, self.slots * self.row_bytes)
        return tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))


class ExpertLaunches:
    """One rank's launches.

    Args:
        mine: this rank's buffer, uint8 of ``form.offsets[-1]``, zeros before the first call of any rank.
        bases: the address of each rank's buffer in this process.
        rank: this one's number among them.
    """

    def __init__(self, form: Form, mine: Tensor, bases: Sequence[int], rank: int):
        self.form, self.mine = form, mine
        peers = Peers((ctypes.c_uint64 * MOST_RANKS)(*bases, *[0] * (MOST_RANKS - len(bases))))
        units = form.row_bytes // UNIT
        places = Places(*form.offsets[:4], form.tokens, units, rank, form.k, form.each, 0)
        self._scalars = [peers, places]
        self._grid = (min(form.tokens, MOST_BLOCKS), 1)  # all of them run at once: a block waits for its peers
        self._block = min(512, max(-(-units // 32) * 32, 64))
        self._plans: dict[tuple[str, int], CudaPlan] = {}
        experts, weights, rows, returned, _ = form.offsets
        self.experts = mine[experts:weights].view(torch.int32)[: form.slots * form.k].view(form.slots, form.k)
        self.weights = mine[weights:rows].view(torch.float32)[: form.slots * form.k].view(form.slots, form.k)
        self.rows = mine[rows:returned].view(form.dtype).view(form.slots, form.width)

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> None:
        """x [T, width], experts int32 and weights fp32 [T, k], contiguous -> every rank's slots."""
        self._plan(f"dispatch<{self.form.ranks}>", len(x))(x, experts, weights, self.mine)

    def combine(self, y: Tensor, experts: Tensor, out: Tensor) -> None:
        """y [slots, width], and the experts of the dispatch before -> out [T, width]."""
        name = f"combine<{CTYPES[self.form.dtype]}, {self.form.ranks}>"
        self._plan(name, len(out))(y, experts, out, self.mine)

    def _plan(self, name: str, tokens: int) -> CudaPlan:
        if (name, tokens) not in self._plans:
            scalars = [*self._scalars, ctypes.c_int64(tokens)]
            self._plans[name, tokens] = CudaPlan(SOURCE, name, self._grid, self._block, scalars)
        return self._plans[name, tokens]
