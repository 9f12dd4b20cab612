"""MPI, through mpi4py, on host memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

INSTALL = "pip install 'weft[mpi]' (mpi4py with Open MPI's wheel), or mpi4py beside the machine's own MPI"
# MPI has no portable 16-bit floating-point types, so these are moved and not reduced.
REDUCED = (torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8)


def world() -> Any:
    """MPI's communicator of all ranks.

    Raises:
        ModuleNotFoundError: no mpi4py.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"the backend mpi needs mpi4py: {INSTALL}", name="mpi4py") from missing
    return MPI.COMM_WORLD


class MpiTransport:
    """Args:
    communicator: of mpi4py.
    """

    backend = "mpi"
    operators: tuple[str, ...] = ("sum", "prod", "min", "max")

    def __init__(self, communicator: Any):
        from mpi4py import MPI

        self.mpi, self.comm = MPI, communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self.ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

    def all_reduce(self, out: Any, inp: Any, op: str, wait: bool) -> Any:
        given = self.mpi.IN_PLACE if _same(out, inp) else _numbers(inp)
        call = self.comm.Allreduce if wait else self.comm.Iallreduce
        return call(given, _numbers(out), op=self.ops[op])

    def all_gather(self, out: Any, inp: Any, wait: bool) -> Any:
        inside = _same(out[self.rank * inp.numel() :], inp)
        call = self.comm.Allgather if wait else self.comm.Iallgather
        return call(self.mpi.IN_PLACE if inside else _bytes(inp), _bytes(out))

    def reduce_scatter(self, out: Any, inp: Any, op: str, wait: bool) -> Any:
        if _same(inp[self.rank * out.numel() :], out):  # MPI's own in-place result is at the beginning
            inp = inp.clone()
        call = self.comm.Reduce_scatter_block if wait else self.comm.Ireduce_scatter_block
        return _kept(call(_numbers(inp), _numbers(out), op=self.ops[op]), inp)

    def broadcast(self, out: Any, inp: Any, root: int, wait: bool) -> Any:
        if self.rank == root and not _same(out, inp):
            out.copy_(inp)
        return (self.comm.Bcast if wait else self.comm.Ibcast)(_bytes(out), root=root)

    def reduce(self, out: Any, inp: Any, op: str, root: int, wait: bool) -> Any:
        same = _same(out, inp) and self.rank == root
        call = self.comm.Reduce if wait else self.comm.Ireduce
        return call(
            self.mpi.IN_PLACE if same else _numbers(inp),
            _numbers(out) if self.rank == root else None,
            op=self.ops[op],
            root=root,
        )

    def gather(self, out: Any, inp: Any, root: int, wait: bool) -> Any:
        call = self.comm.Gather if wait else self.comm.Igather
        return call(_bytes(inp), _bytes(out) if self.rank == root else None, root=root)

    def scatter(self, out: Any, inp: Any, root: int, wait: bool) -> Any:
        call = self.comm.Scatter if wait else self.comm.Iscatter
        return call(_bytes(inp) if self.rank == root else None, _bytes(out), root=root)

    def all_to_all(
        self, out: Any, inp: Any, sends: Sequence[int] | None, receives: Sequence[int] | None, wait: bool
    ) -> Any:
        if sends is None or receives is None:
            return (self.comm.Alltoall if wait else self.comm.Ialltoall)(_bytes(inp), _bytes(out))
        size = inp.element_size()
        call = self.comm.Alltoallv if wait else self.comm.Ialltoallv
        return call([_bytes(inp), [n * size for n in sends]], [_bytes(out), [n * size for n in receives]])

    def exchange(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]], wait: bool) -> Any:
        requests = [self.comm.Irecv(_bytes(t), source=r) for t, r in receives]
        requests += [self.comm.Isend(_bytes(t), dest=r) for t, r in sends]
        if wait:
            self.mpi.Request.Waitall(requests)
            return None
        return _Requests(self.mpi, requests)

    def barrier(self, wait: bool) -> Any:
        return (self.comm.Barrier if wait else self.comm.Ibarrier)()

    def subgroups(self, groups: Sequence[Sequence[int]]) -> "MpiTransport":
        mine = next(i for i, group in enumerate(groups) if self.rank in group)
        return MpiTransport(self.comm.Split(color=mine, key=list(groups[mine]).index(self.rank)))

    def close(self) -> None:
        pass  # mpi4py finalises at exit


class _Requests:
    def __init__(self, mpi: Any, requests: Sequence[Any]):
        self.mpi, self.requests = mpi, requests

    def wait(self) -> None:
        self.mpi.Request.Waitall(self.requests)


class _Holding:
    """A request, and the tensor that it reads."""

    def __init__(self, request: Any, tensor: Any):
        self.request, self.tensor = request, tensor

    def wait(self) -> None:
        self.request.wait()


def _kept(request: Any, tensor: Any) -> Any:
    return None if request is None else _Holding(request, tensor)


def _same(a: Any, b: Any) -> bool:
    return a.data_ptr() == b.data_ptr()


def _bytes(x: Any) -> np.ndarray:
    return x.view(torch.uint8).numpy()


def _numbers(x: Any) -> np.ndarray:
    if x.dtype not in REDUCED:
        names = ", ".join(str(d).removeprefix("torch.") for d in REDUCED)
        raise ValueError(f"MPI reduces no {str(x.dtype).removeprefix('torch.')}; expected one of {names}")
    return x.numpy()
