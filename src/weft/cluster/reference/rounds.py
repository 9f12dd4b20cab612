"""Policies in plain Python that decide in rounds, with the whole state before them.

::

    def decide(view):
        return sorted(view.jobs, key=view.served)  # which jobs should hold GPUs, the most important first

    ORDER = Order("time-slices", lambda jobs: (), "…", rounds=Rounds(decide, every_s=360))

Jobs get GPUs in that order: a running job keeps its nodes, unless one before it in the list needs them. A job that is
not in the list holds no GPUs until the next round. Rounds come at every arrival and completion, or at every multiple of
so many seconds. A policy reads the simulator's own jobs and nodes through views that refuse to be written to. Nothing
here is compiled: thousands of jobs, not millions.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NoReturn

from weft.cluster.reference import preemption
from weft.cluster.reference.model import Job, Node, Piece
from weft.cluster.reference.state import State
from weft.words import count


class PolicyError(ValueError):
    """A policy that raises, or whose decision is impossible; the message has its name, the time, and the job it is
    about."""


# ---- what a policy sees ----------------------------------------------------------------------------------------------


def _refuse(what: str, name: str) -> NoReturn:
    raise AttributeError(f"{what}: '{name}' is read-only; a policy decides by the list that it returns")


class NodeView(Node):
    """A node. It has the attributes of the simulator's own, and refuses the methods that change it."""

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
        _refuse(f"node '{self.id}'", name)

    def __delattr__(self, name: str) -> NoReturn:
        _refuse(f"node '{self.id}'", name)

    def clear(self) -> NoReturn:
        _refuse(f"node '{self.id}'", "pieces")

    def change(self, piece: Piece, gpus: list[int], sign: int) -> NoReturn:
        _refuse(f"node '{self.id}'", "pieces")

    def take(self, piece: Piece, job: Any, gpus: list[int]) -> NoReturn:
        _refuse(f"node '{self.id}'", "pieces")

    def give_back(self, piece: Piece, job: Any, gpus: list[int]) -> NoReturn:
        _refuse(f"node '{self.id}'", "pieces")


class JobView(Job):
    """A job, likewise."""

    _of: Job

    def __init__(self, job: Job):
        object.__setattr__(self, "_of", job)

    @property
    def placed(self) -> tuple[tuple[NodeView, Piece, tuple[int, ...]], ...]:  # type: ignore[override]
        return tuple((NodeView(node), piece, tuple(gpus)) for node, piece, gpus in self._of.placed)

    @property
    def waited(self) -> Mapping[str, float]:  # type: ignore[override]
        return MappingProxyType(self._of.waited)

    @property
    def stretches(self) -> tuple[tuple[float, float, tuple[str, ...], tuple[int, ...]], ...]:  # type: ignore[override]
        return tuple((begin, end, tuple(nodes), tuple(on)) for begin, end, nodes, on in self._of.stretches)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        _refuse(f"job {self.id!r}", name)

    def __delattr__(self, name: str) -> NoReturn:
        _refuse(f"job {self.id!r}", name)

    def release(self) -> NoReturn:
        _refuse(f"job {self.id!r}", "placed")


for view, names in (
    (NodeView, (*(field.name for field in dataclasses.fields(Node)), "free_cpu", "free_memory")),
    (JobView, tuple(field.name for field in dataclasses.fields(Job))),
):
    for name in names:
        if name not in vars(view):  # read from the simulator's own, so that it is never out of date
            setattr(view, name, property(attrgetter(f"_of.{name}")))


class SimulatorView:
    """What else a policy may want to know: costs of preemption, weights and quotas, types and racks, the history."""

    SHOWN = (
        "now", "restart_s", "checkpoint_s", "weights", "quotas", "tenants", "types", "racks", "domains", "history",
        "jobs", "nodes",
    )  # fmt: skip

    def __init__(self, sim: State):
        object.__setattr__(self, "_sim", sim)

    def __getattr__(self, name: str) -> Any:
        if name not in self.SHOWN:
            raise AttributeError(f"the simulator shows a policy no '{name}'; expected one of {', '.join(self.SHOWN)}")
        value = getattr(self._sim, name)
        if name == "jobs":
            value = {id: JobView(job) for id, job in value.items()}
        elif name == "nodes":
            value = [NodeView(node) for node in value]
        if isinstance(value, Mapping):
            return MappingProxyType(value)
        return tuple(value) if isinstance(value, list) else value

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        _refuse("the simulator", name)

    def __delattr__(self, name: str) -> NoReturn:
        _refuse("the simulator", name)


@dataclass(frozen=True)
class View:
    """What a policy sees at a round; read-only.

    Args:
        now: seconds.
        jobs: all that have arrived and not ended; ``job.row`` is its row of the trace, ``job.state`` ``running`` or not,
            ``job.placed`` its nodes.
        nodes: with what is free of them.
        simulator: all else: quotas, racks, costs, the history (:class:`SimulatorView`).
    """

    now: float
    jobs: tuple[JobView, ...]
    nodes: tuple[NodeView, ...]
    simulator: SimulatorView

    def served(self, job: Job) -> float:
        """Seconds that a job has held its GPUs."""
        return job.served + (self.now - job.last_start if job.state == "running" else 0.0)

    def remaining(self, job: Job) -> float:
        """Seconds until it would end by its estimate, were it to hold its GPUs from now on; a restart counts."""
        if job.state == "running":
            return job.remaining + job.restart - (self.now - job.last_start)
        return job.remaining + float(self.simulator.restart_s if job.stops else 0.0)


# ---- rounds ----------------------------------------------------------------------------------------------------------


def next_round(now: float, every_s: float) -> float:
    """The first round after a time, of those every so many seconds; inf where rounds come with events."""
    if not every_s:
        return math.inf
    number = math.floor(now / every_s)
    while number * every_s <= now:  # the quotient is rounded
        number += 1
    return number * every_s


def decide(sim: State) -> None:
    """One round, if it is time for one: asks the policy, preempts the jobs that are not chosen, and starts the chosen
    ones."""
    assert sim.order.rounds
    every = sim.order.rounds.every_s
    if every and round(sim.now / every) * every != sim.now:
        return
    running = sim.running
    present = {job.number: job for job in sorted([*sim.queue, *running], key=lambda job: job.number)}
    shown = {number: JobView(job) for number, job in present.items()}
    view = View(sim.now, tuple(shown.values()), tuple(map(NodeView, sim.nodes)), SimulatorView(sim))
    name = f"policy '{sim.order.name}' at {sim.now:g} s"
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            decision = list(sim.order.rounds.decide(view))
    except (Exception, SystemExit) as error:
        raise PolicyError(f"{name} raised {type(error).__name__}: {error}") from error
    chosen: set[int] = set()
    for rank, job in enumerate(decision):
        if not isinstance(job, JobView) or shown.get(job.number) is not job:
            raise PolicyError(f"{name} chose {getattr(job, 'id', job)!r}; expected jobs of view.jobs")
        if job.number in chosen:
            raise PolicyError(f"{name} chose job {job.id!r} twice; expected each once")
        chosen.add(job.number)
        present[job.number].priority_key = float(rank)
    for job in running:
        if job.number not in chosen:
            job.release()
            preemption.stop(sim, job)
    left_out = [job for job in sim.queue if job.number not in chosen]
    sim.queue = [job for job in sim.queue if job.number in chosen]
    preemption.start_waiting(sim, [])
    sim.queue += left_out
    sim.history.append((sim.now, "round", sim.order.name))
    if sim.queue and not sim.arriving and not any(job.state == "running" for job in present.values()):
        first = min(sim.queue, key=lambda job: job.number)
        raise PolicyError(
            f"{name} starts none of the waiting jobs ({count(len(sim.queue), 'job')}), and nothing runs or will arrive: "
            f"job {first.id!r} waits since {first.submit:g} s"
        )
