"""Tensor parallelism over ``torch.distributed``: ranks share the heads and hidden units, and all make the same calls."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Ranks:
    """A job's ranks, which ``torchrun`` started."""

    rank: int
    ranks: int

    @classmethod
    def join(cls, ranks: int, device: torch.device) -> "Ranks":
        """Joins the job. Raises ValueError where there is none, or one of another size."""
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                raise ValueError(
                    f"argument 'tensor_parallel' is {ranks} outside of a job; expected processes that "
                    f"torchrun --nproc-per-node {ranks} started"
                )
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if dist.get_world_size() != ranks:
            raise ValueError(f"argument 'tensor_parallel' is {ranks}; expected the job's {dist.get_world_size()} ranks")
        return cls(dist.get_rank(), ranks)

    def reduce(self, x: Tensor) -> None:
        """Sums over the ranks, in place."""
        dist.all_reduce(x)

    def agree(self, tokens: Tensor) -> None:
        """Gives all ranks the first one's tokens."""
        dist.broadcast(tokens, 0)
