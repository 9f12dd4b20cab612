"""The all-to-alls of a mixture of experts that is spread over ranks (expert parallelism): tokens to the ranks of their
experts, results back. Over symmetric memory, or by NCCL's (Gloo's) all-to-all of what is sent.

T tokens of this rank, D elements each, k experts a token; R rows that a rank receives.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.group import Group
from weft.comm.symmetric.expert_launches import ExpertLaunches, Form
from weft.comm.symmetric.memory import SymmetricMemory
from weft.comm.symmetric.stream_order import StreamOrder

NCCL, SYMMETRIC = "nccl", "symmetric"
CALLS, ROUNDS = 5, 7  # exchanges that are timed together, and how often


@dataclass
class Received:
    """What a rank's experts are to do. Rows whose experts are all -1 hold nothing."""

    rows: Tensor  # [R, D]
    experts: Tensor  # [R, k] int32, numbers among this rank's experts; -1: another rank's
    weights: Tensor  # [R, k] fp32; 0 where the expert is -1
    way: str
    sent: Any  # what combine needs of this rank's own tokens


class ExpertAllToAll:
    """Dispatches tokens and combines results, alternately; all ranks make the same calls in the same order.

    Args:
        group: over NCCL (or Gloo, whose own all-to-all is then the only way).
        tokens: the most of a rank.
        width: D. Rows are of 16-byte units.
        k: experts of a token.
        experts: of all ranks together; rank r has those from r * experts / ranks on.
        measure: time both ways now with so many tokens on every rank; False takes symmetric memory, which is a guess.

    Raises:
        ValueError: sizes that do not go together.
        RuntimeError: PyTorch cannot map the peers' memory.
    """

    def __init__(
        self, group: Group, *, tokens: int, width: int, k: int, experts: int, dtype: torch.dtype = torch.bfloat16,
        measure: bool = True,
    ):  # fmt: skip
        self.group, self.form = group, Form(group.size, tokens, width, k, experts, dtype)
        self.measured_us: dict[str, float] = {}  # of each way: a dispatch and a combine
        self._open: Received | None = None
        self._launches: ExpertLaunches | None = None
        if group.backend == "nccl":
            self._memory = SymmetricMemory(group, self.form.offsets[-1])
            self._launches = ExpertLaunches(self.form, self._memory.mine, self._memory.bases, group.rank)
            self._order = StreamOrder("expert exchanges")
            if measure:
                self.measured_us = {way: self._us(way) for way in (NCCL, SYMMETRIC)}

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, *, way: str = "") -> Received:
        """Sends each token to the ranks of its experts, once to each.

        Args:
            x: [T, D], contiguous.
            experts: [T, k] int32; -1 for none.
            weights: [T, k] fp32.
            way: ``symmetric`` or ``nccl``, the same on all ranks; by default the faster one for form.tokens (T may
                differ between ranks). ``nccl`` waits for the device, so it does not go into a CUDA graph.

        The rows are in symmetric memory and valid until the next dispatch.

        Raises:
            ValueError: shapes or dtypes that are not those of this object.
            RuntimeError: two dispatches without a combine between.
        """
        self._check(x, experts, weights)
        if self._open is not None:
            raise RuntimeError("expert exchange: dispatch twice; combine what the last one received first")
        way = way or self.explain()
        if way == NCCL:
            self._open = nccl_dispatch(self.group, x, experts, weights, self.form.each)
        else:
            launches = self._of_symmetric()
            self._order.enter()
            launches.dispatch(x, experts, weights)
            self._open = Received(launches.rows, launches.experts, launches.weights, SYMMETRIC, experts)
        return self._open

    def combine(self, y: Tensor) -> Tensor:
        """The sums over the ranks of what each token's experts made of it, [T, D], added in fp32.

        Args:
            y: [R, D], contiguous: for each received row the sum over this rank's experts, weighted. Rows that hold
                nothing are not read.
        """
        received, self._open = self._open, None
        if received is None:
            raise RuntimeError("expert exchange: combine without a dispatch before")
        if y.shape != received.rows.shape or y.dtype != self.form.dtype or not y.is_contiguous():
            raise ValueError(
                f"expert exchange: y is {list(y.shape)} {y.dtype}; expected contiguous {list(received.rows.shape)} "
                f"{self.form.dtype}, a row for each that was received"
            )
        if received.way == NCCL:
            return nccl_combine(self.group, y, received.sent)
        out = torch.empty((len(received.sent), self.form.width), dtype=y.dtype, device=y.device)
        self._order.enter()
        self._of_symmetric().combine(y, received.sent, out)
        return out

    def explain(self) -> str:
        """The way that is taken by default."""
        if self._launches is None:
            return NCCL
        return min(self.measured_us, key=lambda way: self.measured_us[way], default=SYMMETRIC)

    def _of_symmetric(self) -> ExpertLaunches:
        if self._launches is None:
            raise ValueError(f"expert exchange over {self.group.backend}: expected way 'nccl', its own all-to-all")
        return self._launches

    def _check(self, x: Tensor, experts: Tensor, weights: Tensor) -> None:
        f, t = self.form, len(x)
        expected = ((x, (t, f.width), f.dtype), (experts, (t, f.k), torch.int32), (weights, (t, f.k), torch.float32))
        for name, (tensor, shape, dtype) in zip(("x", "experts", "weights"), expected, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"expert exchange: {name} is {list(tensor.shape)} {tensor.dtype}, contiguous: "
                    f"{tensor.is_contiguous()}; expected contiguous {list(shape)} {dtype}"
                )
        if t > f.tokens:
            raise ValueError(f"expert exchange: {t:,} tokens; this object was made for up to {f.tokens:,} a rank")

    def _us(self, way: str) -> float:
        """Microseconds from Python on the slowest rank, experts at random."""
        f, device = self.form, torch.device("cuda", torch.cuda.current_device())
        g = torch.Generator(device).manual_seed(self.group.rank)
        x = torch.zeros((f.tokens, f.width), dtype=f.dtype, device=device)
        experts = torch.rand((f.tokens, f.experts), generator=g, device=device).topk(f.k).indices.int()
        weights = torch.ones((f.tokens, f.k), device=device)
        times = []
        for _ in range(ROUNDS):
            self.group.transport.barrier(True)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                self.combine(self.dispatch(x, experts, weights, way=way).rows)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e6 / CALLS)
        slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
        self.group.transport.all_reduce(slowest, slowest, "max", True)
        return float(slowest.item())


@dataclass
class _Sent:
    tokens: int
    source: Tensor  # [sent] the token of each row that was sent
    sends: list[int]
    receives: list[int]


def nccl_dispatch(group: Group, x: Tensor, experts: Tensor, weights: Tensor, each: int) -> Received:
    """By the backend's all-to-all: the counts, then rows, experts and weights. Waits for the device."""
    n, k = group.size, experts.shape[1]
    rank_of = torch.where(experts >= 0, experts // each, -1)  # [T, k]
    wanted = (rank_of[None] == torch.arange(n, device=x.device)[:, None, None]).any(-1)  # [n, T]
    counts = wanted.sum(1)
    theirs = torch.empty_like(counts)
    group.transport.all_to_all(theirs, counts, None, None, True)
    sends, receives = torch.stack([counts, theirs]).tolist()
    to, source = wanted.nonzero(as_tuple=True)
    local = torch.where(rank_of[source] == to[:, None], experts[source] % each, -1).int()
    scale = torch.where(local >= 0, weights[source], 0.0)
    rows = [
        x.new_empty((sum(receives), x.shape[1])),
        local.new_empty((sum(receives), k)),
        scale.new_empty((sum(receives), k)),
    ]
    for received, sent in zip(rows, (x[source], local, scale), strict=True):
        width = sent.shape[1]
        there, here = ([s * width for s in side] for side in (sends, receives))
        group.transport.all_to_all(received.view(-1), sent.contiguous().view(-1), there, here, True)
    return Received(rows[0], rows[1], rows[2], NCCL, _Sent(len(x), source, sends, receives))


def nccl_combine(group: Group, y: Tensor, sent: _Sent) -> Tensor:
    """The rows back by the backend's all-to-all, then added in the order of the ranks."""
    back = y.new_empty((len(sent.source), y.shape[1]))
    there, here = ([s * y.shape[1] for s in side] for side in (sent.receives, sent.sends))
    group.transport.all_to_all(back.view(-1), y.view(-1), there, here, True)
    out = torch.zeros((sent.tokens, y.shape[1]), dtype=torch.float32, device=y.device)
    first = 0
    for count in sent.sends:  # a token is sent to a rank once: no two rows of a part are added to one
        out[sent.source[first : first + count]] += back[first : first + count]
        first += count
    return out.to(y.dtype)
