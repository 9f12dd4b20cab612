"""NCCL and Gloo, through torch.distributed."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# PyTorch 2.13 renames both
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OPERATORS = {
    "gloo": ("sum", "prod", "min", "max"),
    "nccl": ("sum", "prod", "min", "max", "avg"),
}
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}  # fmt: skip


def start(backend: str, store: Any, rank: int, ranks: int, device: torch.device, deadline_s: float) -> "TorchTransport":
    """The process group of all ranks."""
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=ranks,
        # beyond our own watch, which names the ranks
        timeout=timedelta(seconds=2 * deadline_s + 10),
        device_id=device if backend == "nccl" else None,
    )
    return TorchTransport(backend, dist.group.WORLD, list(range(ranks)), device)


class TorchTransport:
    """all_reduce, broadcast and reduce are in place in PyTorch's interface: out of place is a copy and the call.

    Args:
        backend: ``nccl`` or ``gloo``.
        group: the process group.
        members: its global ranks.
        device: of all tensors.
    """

    def __init__(self, backend: str, group: Any, members: Sequence[int], device: torch.device):
        self.backend, self.group, self.members, self.device = backend, group, list(members), device
        self.operators = OPERATORS[backend]
        self.rank = self.members.index(dist.get_rank())

    def all_reduce(self, out: Any, inp: Any, op: str, wait: bool) -> Any:
        _into(out, inp)
        return dist.all_reduce(out, REDUCE_OPS[op], group=self.group, async_op=not wait)

    def all_gather(self, out: Any, inp: Any, wait: bool) -> Any:
        return all_gather(_bytes(out), _bytes(inp), group=self.group, async_op=not wait)

    def reduce_scatter(self, out: Any, inp: Any, op: str, wait: bool) -> Any:
        return reduce_scatter(out, inp, REDUCE_OPS[op], group=self.group, async_op=not wait)

    def broadcast(self, out: Any, inp: Any, root: int, wait: bool) -> Any:
        if self.rank == root:
            _into(out, inp)
        return dist.broadcast(_bytes(out), self.members[root], group=self.group, async_op=not wait)

    def reduce(self, out: Any, inp: Any, op: str, root: int, wait: bool) -> Any:
        _into(out, inp)
        return dist.reduce(out, self.members[root], REDUCE_OPS[op], group=self.group, async_op=not wait)

    def gather(self, out: Any, inp: Any, root: int, wait: bool) -> Any:
        parts = list(_bytes(out).chunk(len(self.members))) if self.rank == root else None
        return dist.gather(_bytes(inp), parts, self.members[root], group=self.group, async_op=not wait)

    def scatter(self, out: Any, inp: Any, root: int, wait: bool) -> Any:
        parts = list(_bytes(inp).chunk(len(self.members))) if self.rank == root else None
        return dist.scatter(_bytes(out), parts, self.members[root], group=self.group, async_op=not wait)

    def all_to_all(
        self, out: Any, inp: Any, sends: Sequence[int] | None, receives: Sequence[int] | None, wait: bool
    ) -> Any:
        size = inp.element_size()
        there, here = (None if side is None else [n * size for n in side] for side in (receives, sends))
        return dist.all_to_all_single(_bytes(out), _bytes(inp), there, here, group=self.group, async_op=not wait)

    def exchange(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]], wait: bool) -> Any:
        calls = [dist.P2POp(dist.isend, _bytes(t), self.members[r], self.group) for t, r in sends]
        calls += [dist.P2POp(dist.irecv, _bytes(t), self.members[r], self.group) for t, r in receives]
        works = _Works(dist.batch_isend_irecv(calls) if calls else [])
        if not wait:
            return works
        works.wait()
        return None

    def barrier(self, wait: bool) -> Any:
        ids = [self.device.index] if self.backend == "nccl" else None
        return dist.barrier(self.group, async_op=not wait, device_ids=ids)

    def subgroups(self, groups: Sequence[Sequence[int]]) -> "TorchTransport":
        made = [dist.new_group([self.members[r] for r in group]) for group in groups]
        mine = next(i for i, group in enumerate(groups) if self.rank in group)
        return TorchTransport(self.backend, made[mine], [self.members[r] for r in groups[mine]], self.device)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Works:
    def __init__(self, works: Sequence[Any]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _into(out: Any, inp: Any) -> None:
    if out.data_ptr() != inp.data_ptr():
        out.copy_(inp)


def _bytes(x: Any) -> Any:
    """What is only moved is moved as bytes: every dtype travels, fp8 too."""
    return x.view(torch.uint8)


def registered(group: Any, device: torch.device) -> Callable[[int, torch.dtype], Any]:
    """Allocates tensors in memory that NCCL has registered as symmetric windows, which its symmetric kernels take (NCCL of
    2.27 on, PyTorch of 2.9). All ranks allocate the same sizes in the same order."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NCCL")

    def empty(n: int, dtype: torch.dtype) -> Any:
        found = symmetric.empty(max(n, 1), dtype=dtype, device=device)[:n]
        symmetric.rendezvous(found, group.group_name)
        return found

    return empty
