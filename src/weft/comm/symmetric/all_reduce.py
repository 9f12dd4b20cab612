"""All-reduce over symmetric memory, and fused with the residual and RMSNorm that follow it in a decoder.

Which algorithm, with how many blocks, or NCCL, is measured for the ranks at hand when an :class:`AllReduce` is made.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.comm.group import Group
from weft.comm.symmetric.launches import ALGORITHMS, UNIT, Launches, buffer_bytes
from weft.comm.symmetric.memory import SymmetricMemory
from weft.comm.symmetric.stream_order import StreamOrder
from weft.comm.symmetric.timed import slowest_us

MOST_BYTES = 8 << 20
FLAGGED_BYTES = 1 << 20
LEAST_MEASURED = 4 << 10
BLOCKS = {"one_shot_flagged": (0,), "one_shot": (32, 64, 128, 256), "two_shot": (32, 64, 128, 256)}  # that are tried
NCCL = "nccl"


@dataclass(frozen=True)
class Choice:
    """What is called up to so many bytes, and the microseconds of every candidate at that size (slowest rank, median)."""

    most_bytes: int
    algorithm: str
    blocks: int
    measured_us: dict[str, float]


class AllReduce:
    """Sums tensors of all ranks of one host, whose GPUs reach each other's memory.

    Calls are made in the same order on all ranks, from one stream or from several, one after another: a call from another
    stream waits for the one before (and is refused while a CUDA graph is captured). Results are the same bits on all ranks.

    Args:
        group: of ``weft.comm.run.join`` over NCCL.
        most_bytes: larger tensors go to NCCL. Each rank's buffer takes 2 x ranks x (most_bytes + 2 MiB).
        measure: time all candidates now, about a second; False takes flagged up to 64 KiB, then one shot for two ranks and
            two for more, which is a guess.

    Raises:
        ValueError: fewer than 2 or more than 8 ranks.
        RuntimeError: PyTorch cannot map the peers' memory.
    """

    def __init__(self, group: Group, *, most_bytes: int = MOST_BYTES, measure: bool = True):
        self.group = group
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._memory = SymmetricMemory(group, buffer_bytes(group.size, most_bytes, FLAGGED_BYTES))
        self.launches = Launches(self._memory.mine, self._memory.bases, group.rank, most_bytes, FLAGGED_BYTES)
        self.most_bytes = most_bytes
        self._order = StreamOrder("all-reduces")
        large = "one_shot" if group.size == 2 else "two_shot"
        self.choices = [Choice(64 << 10, "one_shot_flagged", 0, {}), Choice(most_bytes, large, 128, {})]
        if measure:
            self.choices = self.measured()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum over the ranks of ``x`` (fp32, fp16, bf16, added in fp32), into ``out`` (by default a new tensor; may be
        ``x``). What the kernels do not take (unaligned, too large, other dtypes) goes to NCCL: :meth:`explain` says which."""
        out = torch.empty_like(x) if out is None else out
        algorithm, blocks = self.explain(x)
        if algorithm == NCCL or self.launches.refused(algorithm, out):
            self._nccl(x, out)
        else:
            self._order.enter()
            self.launches(algorithm, x, out, blocks)
        return out

    def explain(self, x: Tensor) -> tuple[str, int]:
        """The algorithm and blocks of a call; ``nccl`` where no kernel takes it or NCCL was measured faster."""
        choice = self._choice_of(x.numel() * x.element_size())
        if choice is None or choice.algorithm == NCCL:
            return NCCL, 0
        for algorithm in (choice.algorithm, "one_shot"):  # an odd number of units does not divide for two_shot
            if not self.launches.refused(algorithm, x):
                return algorithm, choice.blocks
        return NCCL, 0

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        """``hidden`` = the sum over the ranks of ``x`` + ``residual``; returns its RMSNorm times ``weight`` and ``hidden``.

        Args:
            x: this rank's partial sums, ``[..., width]``.
            residual: the same on all ranks, as ``x``.
            weight: ``[width]``.

        In one kernel up to 256 rows; beyond that the all-reduce, whose
        result is rounded once more, then ``weft.ops.add_rms_norm``.
        """
        if x.shape != residual.shape or weight.shape != x.shape[-1:] or not x.dtype == residual.dtype == weight.dtype:
            raise ValueError(
                f"x is {tuple(x.shape)} {x.dtype}, residual {tuple(residual.shape)} {residual.dtype}, weight "
                f"{tuple(weight.shape)} {weight.dtype}; expected the same shape and dtype, and a weight of the last dimension"
            )
        # here flags in the data lose to a fence at half of the all-reduce's size: a block has a row, with its own registers
        choice = self._choice_of(2 * x.numel() * x.element_size())
        flagged = choice is not None and choice.algorithm == "one_shot_flagged"
        aligned = not any(self.launches.refused("one_shot", t) for t in (residual, weight))
        if aligned and not self.launches.rows_refused(x, flagged):
            out, hidden = torch.empty_like(x), torch.empty_like(x)
            self._order.enter()
            self.launches.add_rms_norm(x, residual, weight, eps, out, hidden, flagged)
            return out, hidden
        from weft import ops

        return ops.add_rms_norm(self(x), residual, weight, eps=eps)

    def _choice_of(self, size: int) -> Choice | None:
        return next((c for c in self.choices if size <= c.most_bytes), None)

    def _nccl(self, x: Tensor, out: Tensor) -> None:
        self.group.transport.all_reduce(out, x, "sum", True)

    # ---- which one

    def measured(self) -> list[Choice]:
        """Times every candidate from 4 KiB to ``most_bytes`` in CUDA graphs; the fastest on the slowest rank is chosen."""
        sizes = []
        size = LEAST_MEASURED
        while size <= self.most_bytes:
            sizes.append(size)
            size *= 2
        return [self._choice(size) for size in sizes]

    def _choice(self, size: int) -> Choice:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=self.device)
        out = torch.empty_like(x)
        candidates: dict[str, Any] = {NCCL: partial(self._nccl, out, out)}
        for algorithm in ALGORITHMS:
            if not self.launches.refused(algorithm, x):
                for blocks in BLOCKS[algorithm]:
                    if blocks * 512 * UNIT <= 2 * size or blocks == BLOCKS[algorithm][0]:
                        candidates[f"{algorithm}/{blocks}"] = partial(self.launches, algorithm, x, out, blocks)
        found = slowest_us(self.group, candidates)
        best = min(found, key=lambda name: found[name])
        chosen, _, of_blocks = best.partition("/")
        return Choice(size, chosen, int(of_blocks or 0), found)
