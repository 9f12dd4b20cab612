"""What a policy in plain Python is shown: the simulator's own jobs and nodes, to read and not to write, so that it can only
decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from weft.cluster.parts import Job, Node, Piece

if TYPE_CHECKING:
    from weft.cluster.reference import Simulator


def refuse(what: str, name: str) -> NoReturn:
    raise AttributeError(f"{what}: '{name}' is read-only; a policy decides by the list that it returns")


class SeenNode(Node):
    """A node. It has the attributes of the simulator's own, and none of the methods that change it."""

    _of: Node

    def __init__(self, node: Node):
        object.__setattr__(self, "_of", node)

    @property
    def pieces(self) -> tuple[tuple[Any, Piece, tuple[int, ...]], ...]:  # type: ignore[override]
        return tuple((job, piece, tuple(gpus)) for job, piece, gpus in self._of.pieces)

    @property
    def milli(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._of.milli)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        refuse(f"node '{self.id}'", name)

    def __delattr__(self, name: str) -> NoReturn:
        refuse(f"node '{self.id}'", name)

    def clear(self) -> NoReturn:
        refuse(f"node '{self.id}'", "pieces")

    def change(self, piece: Piece, gpus: list[int], sign: int) -> NoReturn:
        refuse(f"node '{self.id}'", "pieces")

    def take(self, piece: Piece, job: Any, gpus: list[int]) -> NoReturn:
        refuse(f"node '{self.id}'", "pieces")

    def give_back(self, piece: Piece, job: Any, gpus: list[int]) -> NoReturn:
        refuse(f"node '{self.id}'", "pieces")


class SeenJob(Job):
    """A job, likewise."""

    _of: Job

    def __init__(self, job: Job):
        object.__setattr__(self, "_of", job)

    @property
    def placed(self) -> tuple[tuple[SeenNode, Piece, tuple[int, ...]], ...]:  # type: ignore[override]
        return tuple((SeenNode(node), piece, tuple(gpus)) for node, piece, gpus in self._of.placed)

    @property
    def waited(self) -> Mapping[str, float]:  # type: ignore[override]
        return MappingProxyType(self._of.waited)

    @property
    def stretches(self) -> tuple[tuple[float, float, tuple[str, ...], tuple[int, ...]], ...]:  # type: ignore[override]
        return tuple((begin, end, tuple(nodes), tuple(on)) for begin, end, nodes, on in self._of.stretches)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        refuse(f"job {self.id!r}", name)

    def __delattr__(self, name: str) -> NoReturn:
        refuse(f"job {self.id!r}", name)


for seen, names in (
    (SeenNode, (*(field.name for field in dataclasses.fields(Node)), "free_cpu", "free_memory")),
    (SeenJob, tuple(field.name for field in dataclasses.fields(Job))),
):
    for name in names:
        if name not in vars(seen):  # read from the simulator's own, so that it is never out of date
            setattr(seen, name, property(attrgetter(f"_of.{name}")))


class SeenSimulator:
    """What else a policy may want to know: what stopping costs, weights and quotas, types and racks, what has happened."""

    SHOWN = (
        "now", "restart_s", "checkpoint_s", "weights", "quotas", "tenants", "types", "racks", "domains", "history",
        "jobs", "nodes",
    )  # fmt: skip

    def __init__(self, sim: Simulator):
        object.__setattr__(self, "_sim", sim)

    def __getattr__(self, name: str) -> Any:
        if name not in self.SHOWN:
            raise AttributeError(f"the simulator shows a policy no '{name}'; expected one of {', '.join(self.SHOWN)}")
        value = getattr(self._sim, name)
        if name == "jobs":
            value = {id: SeenJob(job) for id, job in value.items()}
        elif name == "nodes":
            value = [SeenNode(node) for node in value]
        if isinstance(value, Mapping):
            return MappingProxyType(value)
        return tuple(value) if isinstance(value, list) else value

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        refuse("the simulator", name)

    def __delattr__(self, name: str) -> NoReturn:
        refuse("the simulator", name)
