"""Tensor parallelism over ``weft.comm``: ranks share the heads and hidden units, and all make the same calls."""

import functools
from typing import Any

import torch
from torch import Tensor

from weft import ops

DEADLINE_S = 300.0  # for the other ranks to come, and for a collective while one of them loads


class Ranks:
    """This process's place among the ranks of a job. On GPUs small sums go through memory that all ranks map.

    Args:
        group: of ``weft.comm.run.join``.
        store: that all ranks share.
        device: of this rank.
    """

    def __init__(self, group: Any, store: Any, device: torch.device):
        self.rank, self.ranks, self.device = group.rank, group.size, device
        self.store, self.transport = store, group.transport
        self.all_reduce: Any = None
        if device.type == "cuda":
            from weft.comm.symmetric import AllReduce

            try:
                self.all_reduce = AllReduce(group)
            except RuntimeError:  # GPUs that do not reach each other's memory
                self.all_reduce = None

    @classmethod
    def join(cls, ranks: int, device: torch.device) -> "Ranks":
        """Joins the job that ``torchrun`` or another launcher started, once a process.

        Raises:
            ValueError: there is no job, or one of another size.
            weft.comm.checked.CollectiveFailed: a rank does not come.
        """
        from weft.comm.ranks import started

        who = started()
        if who is None:
            raise ValueError(
                f"argument 'tensor_parallel' is {ranks} outside of a job; expected processes that "
                f"torchrun --nproc-per-node {ranks} started"
            )
        if who.size != ranks:
            raise ValueError(f"argument 'tensor_parallel' is {ranks}; expected the job's {who.size} ranks")
        return _joined("nccl" if device.type == "cuda" else "gloo", who)

    def reduce(self, x: Tensor) -> None:
        """Sums over the ranks, in place."""
        if self.all_reduce is not None:
            self.all_reduce(x, x)
        else:
            self.transport.all_reduce(x, x, "sum", True)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """norm(h) · weight and h = residual + the sum of ``x`` over the ranks; x, residual [T, width], weight [width]."""
        if self.all_reduce is not None:
            y, h = self.all_reduce.add_rms_norm(x, residual, weight, eps)
            return y, h
        self.reduce(x)
        y, h = ops.add_rms_norm(x, residual, weight, eps)
        return y, h

    def agree(self, tokens: Tensor) -> None:
        """Gives all ranks the first one's tokens."""
        self.transport.broadcast(tokens, tokens, 0, True)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        t = torch.tensor([number], dtype=torch.int64, device=self.device)
        self.transport.all_reduce(t, t, "min", True)
        return int(t.item())


@functools.cache
def _joined(backend: str, who: Any) -> Ranks:
    from weft.comm.run import join

    group, control, device = join(backend, who, DEADLINE_S)
    return Ranks(group, control.store, device)
