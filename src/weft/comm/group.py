"""Ranks that communicate: one set of methods over NCCL, Gloo and MPI, and the check that all ranks make the same call."""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from weft.comm.checked import Control, Signature

Part = tuple[Any, int]  # a tensor, and the rank that it goes to or comes from


class Transport(Protocol):
    """How a backend makes a call. Each method returns a handle with ``wait()``, or None when the call is done."""

    backend: str
    operators: tuple[str, ...]

    def all_reduce(self, out: Any, inp: Any, op: str, wait: bool) -> Any: ...
    def all_gather(self, out: Any, inp: Any, wait: bool) -> Any: ...
    def reduce_scatter(self, out: Any, inp: Any, op: str, wait: bool) -> Any: ...
    def broadcast(self, out: Any, inp: Any, root: int, wait: bool) -> Any: ...
    def reduce(self, out: Any, inp: Any, op: str, root: int, wait: bool) -> Any: ...
    def gather(self, out: Any, inp: Any, root: int, wait: bool) -> Any: ...
    def scatter(self, out: Any, inp: Any, root: int, wait: bool) -> Any: ...
    def all_to_all(
        self, out: Any, inp: Any, sends: Sequence[int] | None, receives: Sequence[int] | None, wait: bool
    ) -> Any: ...
    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], wait: bool) -> Any: ...
    def barrier(self, wait: bool) -> Any: ...
    def subgroups(self, groups: Sequence[Sequence[int]]) -> Any: ...
    def close(self) -> None: ...


class Group:
    """A group of ranks.

    Every method takes contiguous tensors on the backend's device (``out`` may be ``inp``: in place). With ``checked`` the
    ranks first compare what they are about to call, through the rendezvous store: other collectives, shapes, dtypes,
    operators or roots raise :class:`weft.comm.checked.Mismatch` on every rank, and a rank that does not come raises
    :class:`weft.comm.checked.Missing` after the deadline. Set ``checked`` to False to time calls.

    Args:
        transport: the backend's calls for these ranks.
        members: global ranks, in the order of their numbers here.
        control: this process's store and watch.
        name: of the group, the same on all its ranks.
    """

    def __init__(self, transport: Transport, members: Sequence[int], control: Control, name: str = "world"):
        self.transport, self.members, self.control, self.name = transport, list(members), control, name
        self.rank, self.size = self.members.index(control.rank), len(self.members)
        self.checked = True

    @property
    def backend(self) -> str:
        return self.transport.backend

    def all_reduce(self, out: Any, inp: Any = None, op: str = "sum", *, wait: bool = True) -> Any:
        """``out`` = the reduction of every rank's ``inp`` (of ``out`` itself where no ``inp`` is given)."""
        inp = out if inp is None else inp
        with self._checked("all_reduce", inp, op=op):
            return self.transport.all_reduce(out, inp, self._known(op), wait)

    def all_gather(self, out: Any, inp: Any, *, wait: bool = True) -> Any:
        """``out`` = every rank's ``inp``, one after another. [n] -> [ranks * n]"""
        with self._checked("all_gather", inp):
            self._times("all_gather", out, inp, self.size)
            return self.transport.all_gather(out, inp, wait)

    def reduce_scatter(self, out: Any, inp: Any, op: str = "sum", *, wait: bool = True) -> Any:
        """``out`` = this rank's part of the reduction of every rank's ``inp``. [ranks * n] -> [n]"""
        with self._checked("reduce_scatter", inp, op=op):
            self._times("reduce_scatter", inp, out, self.size)
            return self.transport.reduce_scatter(out, inp, self._known(op), wait)

    def broadcast(self, out: Any, inp: Any = None, root: int = 0, *, wait: bool = True) -> Any:
        """``out`` = the root's ``inp``."""
        inp = out if inp is None else inp
        with self._checked("broadcast", out, root=root):
            return self.transport.broadcast(out, inp, root, wait)

    def reduce(self, out: Any, inp: Any = None, op: str = "sum", root: int = 0, *, wait: bool = True) -> Any:
        """On the root ``out`` = the reduction of every rank's ``inp``; elsewhere ``out`` is scratch."""
        inp = out if inp is None else inp
        with self._checked("reduce", inp, op=op, root=root):
            return self.transport.reduce(out, inp, self._known(op), root, wait)

    def gather(self, out: Any, inp: Any, root: int = 0, *, wait: bool = True) -> Any:
        """On the root ``out`` = every rank's ``inp``, one after another; elsewhere ``out`` may be None."""
        with self._checked("gather", inp, root=root):
            return self.transport.gather(out, inp, root, wait)

    def scatter(self, out: Any, inp: Any, root: int = 0, *, wait: bool = True) -> Any:
        """``out`` = this rank's part of the root's ``inp``, which may be None elsewhere."""
        with self._checked("scatter", out, root=root):
            return self.transport.scatter(out, inp, root, wait)

    def all_to_all(
        self,
        out: Any,
        inp: Any,
        sends: Sequence[int] | None = None,
        receives: Sequence[int] | None = None,
        *,
        wait: bool = True,
    ) -> Any:
        """Part r of ``inp`` goes to rank r, and part r of ``out`` comes from there: equal parts, or ``sends`` and
        ``receives`` elements."""
        pairs = None if sends is None or receives is None else (list(sends), list(receives))
        with self._checked("all_to_all", inp if pairs is None else None, dtype_of=inp, pairs=pairs):
            return self.transport.all_to_all(out, inp, sends, receives, wait)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], *, wait: bool = True) -> Any:
        """Point to point: all sends and receives of this rank at once. Every rank of the group calls it."""
        dtype = next((t for t, _ in (*sends, *receives)), None)
        counts = [[0] * self.size, [0] * self.size]
        for side, parts in zip(counts, (sends, receives), strict=True):
            for tensor, peer in parts:
                side[peer] += tensor.numel()
        with self._checked("exchange", None, dtype_of=dtype, pairs=(counts[0], counts[1])):
            return self.transport.exchange(sends, receives, wait)

    def barrier(self, *, wait: bool = True) -> Any:
        """Returns when every rank has called it."""
        with self._checked("barrier", None):
            return self.transport.barrier(wait)

    def subgroups(self, groups: Sequence[Sequence[int]]) -> "Group":
        """Splits this group: every rank names all groups (ranks of this one, each in one group) and gets its own."""
        with self._checked("subgroups", None, pairs=None, detail=str([list(g) for g in groups])):
            transport = self.transport.subgroups(groups)
        mine = next(i for i, group in enumerate(groups) if self.rank in group)
        members = [self.members[r] for r in groups[mine]]
        return Group(transport, members, self.control, f"{self.name}/{','.join(map(str, members))}")

    @contextmanager
    def _checked(
        self,
        call: str,
        tensor: Any,
        *,
        dtype_of: Any = None,
        op: str = "",
        root: int | None = None,
        pairs: tuple[list[int], list[int]] | None = None,
        detail: str = "",
    ) -> Any:
        if not self.checked:
            yield
            return
        typed = tensor if tensor is not None else dtype_of
        signature = Signature(
            call,
            tuple(tensor.shape) if tensor is not None else None,
            str(typed.dtype).removeprefix("torch.") if typed is not None else "",
            op,
            root,
            pairs,
            detail,
        )
        self.control.agree(self.name, self.members, signature)
        with self.control.region(f"{signature}"):
            yield

    def _known(self, op: str) -> str:
        if op not in self.transport.operators:
            raise ValueError(
                f"op is '{op}', which {self.backend} does not have; expected one of {', '.join(self.transport.operators)}"
            )
        return op

    def _times(self, call: str, whole: Any, part: Any, n: int) -> None:
        if whole.numel() != part.numel() * n:
            raise ValueError(
                f"{call}: the whole has {whole.numel():,} elements, the part {part.numel():,}; expected {n} parts"
            )
