"""Nodes and jobs as the simulator sees them: columns of numbers, one row a node or a job."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.words import count

WHOLE = 1000  # thousandths of an accelerator
MOST_NODES = 1_000_000
MOST_PODS = 1_000_000  # of a job, and
MOST_REQUESTED = 10_000_000  # GPUs
MOST_GPUS = 2**31  # of a node; that of counted placement holds the whole cluster
MOST_UNITS = 10**9  # cores or GB of a node
LATEST = 1e11  # seconds, 3,000 years; milliseconds since 1970 are more
MOST_SHARED = 16  # accelerators of a node, where single ones are tracked
MOST_TYPES = 62  # accelerator types that fit the bit masks of the compiled engine
FILLED: Any = None  # a column that is not given gets its default


def accepts(wanted: Iterable[str], gpu_type: str) -> bool:
    """Whether a job that names these accelerator types runs on this one: any where it names none; ``a100`` is ``A100``."""
    names = [name.casefold() for name in wanted]
    return not names or gpu_type.casefold() in names


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are alike.

    Args:
        count: how many.
        gpus: accelerators of each (GPUs, NPUs, FPGAs: ``gpu_type`` names the kind); 0 for a CPU node.
        gpu_type: their type, such as ``H100-80GB``.
        gpu_memory_gb: memory of each accelerator; 0 where it is unknown, which fits every job.
        cpu: cores; 0 where they are unknown, which fits every job.
        memory_gb: main memory; 0 where it is unknown.
        rack: the rack of all of them, by name; groups with the same name, or without one, share a rack.
        rack_nodes: or this many nodes a rack, the last one with the rest; no other group shares these racks.
        nvlink_domain: the NVLink domain of all of them, by name; by default each node is one.
        nvlink_domain_nodes: or this many nodes a domain, of which ``rack_nodes`` must be a multiple.
        name: the first part of the nodes' names.
    """

    count: int
    gpus: int = 8
    gpu_type: str = "gpu"
    gpu_memory_gb: float = 0.0
    cpu: float = 0.0
    memory_gb: float = 0.0
    rack: str = ""
    name: str = "node"
    rack_nodes: int | None = None
    nvlink_domain: str = ""
    nvlink_domain_nodes: int | None = None

    def __post_init__(self) -> None:
        for what in ("count", "gpus"):
            if not isinstance(getattr(self, what), (int, np.integer)):
                raise TypeError(f"node group '{self.name}': {what} is {getattr(self, what)!r}; expected a whole number")
        for what in ("count", "gpus", "gpu_memory_gb", "cpu", "memory_gb"):
            if not getattr(self, what) >= 0:  # nor NaN
                raise ValueError(f"node group '{self.name}': {what} is {getattr(self, what)}; expected 0 or more")
        for what, least in (("cpu", 1 / 1000), ("memory_gb", 1 / 1024)):
            given = getattr(self, what)
            if 0 < given < least / 2:  # would be rounded to 0, which is not known
                raise ValueError(f"node group '{self.name}': {what} is {given}; expected 0, or {least:.4g} or more")
        amounts = dict.fromkeys(("gpu_memory_gb", "cpu", "memory_gb"), MOST_UNITS)
        for what, most in {"count": MOST_NODES, "gpus": MOST_GPUS, **amounts}.items():
            if getattr(self, what) > most:
                raise ValueError(
                    f"node group '{self.name}': {what} is {getattr(self, what)}; expected at most {most:,}"
                )
        for name, nodes in (("rack", "rack_nodes"), ("nvlink_domain", "nvlink_domain_nodes")):
            number = getattr(self, nodes)
            if number is not None and number < 1:
                raise ValueError(f"node group '{self.name}': {nodes} is {number}; expected 1 or more nodes")
            if number and getattr(self, name):
                raise ValueError(f"node group '{self.name}': {name} and {nodes} are both given; expected one of them")
        if self.rack_nodes and self.rack_nodes % (self.nvlink_domain_nodes or 1):
            raise ValueError(
                f"node group '{self.name}': rack_nodes is {self.rack_nodes} and nvlink_domain_nodes "
                f"{self.nvlink_domain_nodes}; expected whole domains in a rack"
            )


@dataclass(frozen=True)
class Cluster:
    """The nodes of a cluster, columns of length N.

    Units: cores in thousandths, main memory in MiB, accelerator memory in GB. An unknown capacity is -1.
    """

    names: tuple[str, ...]
    gpus: NDArray[np.int64]
    gpu_type: NDArray[np.int64]  # an index into `types`
    gpu_memory: NDArray[np.float64]
    cpu: NDArray[np.int64]
    memory: NDArray[np.int64]
    rack: NDArray[np.int64]  # an index into `racks`
    types: tuple[str, ...] = ("gpu",)
    racks: tuple[str, ...] = ("",)
    domain: NDArray[np.int64] = FILLED  # its NVLink domain; by default each node is one
    dropped: dict[str, int] = field(default_factory=dict)  # reason → nodes that the loader left out
    warnings: tuple[str, ...] = ()  # what the loader doubts, a sentence each

    def __post_init__(self) -> None:
        if self.domain is None:
            object.__setattr__(self, "domain", np.arange(len(self.names)))

    @classmethod
    def of(cls, groups: Iterable[NodeGroup]) -> "Cluster":
        """The nodes of all groups, in order. Names count up from 0 over all groups with the same name."""
        groups = list(groups)
        types = tuple(dict.fromkeys(g.gpu_type for g in groups)) or ("gpu",)
        if len(types) > MOST_TYPES:
            raise ValueError(f"{len(types)} accelerator types; the simulator holds at most {MOST_TYPES}")
        rack, racks, domain = racks_of(groups)
        counted: dict[str, int] = {}
        names = []
        for g in groups:
            for _ in range(g.count):
                names.append(f"{g.name}-{counted.setdefault(g.name, 0)}")
                counted[g.name] += 1

        def column(value: Any, dtype: type) -> Any:
            return np.array([value(g) for g in groups for _ in range(g.count)], dtype=dtype)

        return cls(
            tuple(names),
            column(lambda g: g.gpus, np.int64),
            column(lambda g: types.index(g.gpu_type), np.int64),
            column(lambda g: g.gpu_memory_gb or -1.0, np.float64),
            column(lambda g: round(g.cpu * 1000) or -1, np.int64),
            column(lambda g: round(g.memory_gb * 1024) or -1, np.int64),
            rack,
            types,
            racks,
            domain,
        )

    @classmethod
    def parse(cls, text: str, gpu_memory_gb: float = 0.0) -> "Cluster":
        """``20x8`` → 20 nodes of 8 GPUs; ``4xA100:8,2xH100:4`` → groups one after the other, of these types.

        Raises:
            ValueError: something else.
        """
        groups = []
        for part in text.split(","):
            found = re.fullmatch(r"([0-9]+)x(?:([^:]+):)?([0-9]+)", part.strip(), re.IGNORECASE)
            if not found:
                raise ValueError(f"nodes '{text}' should read COUNTx[TYPE:]GPUS, such as 20x8 or 4xA100:8,2xH100:4")
            count, kind, gpus = found.groups()
            groups.append(NodeGroup(int(count), int(gpus), kind or "gpu", gpu_memory_gb=gpu_memory_gb))
        made = cls.of(groups)
        if not made.names:
            raise ValueError(f"nodes '{text}' have no node; a cluster needs at least one")
        return made

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        types = f" of {len(self.types)} types" if len(self.types) > 1 else ""
        racks = f" in {len(self.racks)} racks" if len(self.racks) > 1 else ""
        return f"<Cluster: {count(len(self), 'node')}{racks}, {count(self.total_gpus, 'GPU')}{types}>"

    @property
    def total_gpus(self) -> int:
        return int(self.gpus.sum())

    def as_one(self) -> "Cluster":
        """For counted placement: all GPUs of a type and memory in one node, as if any free GPUs would do."""
        kinds = sorted(set(zip(self.gpu_type.tolist(), self.gpu_memory.tolist(), strict=True)))
        members = [np.flatnonzero((self.gpu_type == kind) & (self.gpu_memory == memory)) for kind, memory in kinds]

        def total(column: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.array([-1 if (column[m] < 0).any() else column[m].sum() for m in members], dtype=np.int64)

        return Cluster(
            tuple(f"all-{self.types[kind]}" + (f"-{memory:g}GB" if memory >= 0 else "") for kind, memory in kinds),
            total(self.gpus),
            np.array([kind for kind, _ in kinds], dtype=np.int64),
            np.array([memory for _, memory in kinds]),
            total(self.cpu),
            total(self.memory),
            np.zeros(len(kinds), np.int64),
            self.types,
            dropped=self.dropped,
            warnings=self.warnings,
        )


# Columns that a trace may leave out, and their defaults.
DEFAULTS = {
    "pods": 0, "milli": WHOLE, "gpu_memory": 0.0, "cpu": 0, "memory": 0, "types": 0, "tenant": 0, "priority": 0.0,
}  # fmt: skip
FLOATS = ("submit", "duration", "estimate", "gpu_memory", "priority")


@dataclass
class Jobs:
    """The jobs of a trace, columns of length J in order of submission. Columns that are None get their default.

    Args:
        submit: seconds.
        duration: seconds that it runs, once started.
        gpus: whole accelerators, all its pods together; with ``milli`` below 1000 the accelerators that it takes a share of.
        id: its name in the trace.
        estimate: seconds that its user requested; the duration by default.
        pods: so many equal parts, each on one node; 0 lets the placement divide it over nodes.
        milli: thousandths of each accelerator.
        gpu_memory: GB on each accelerator.
        cpu: thousandths of cores, and
        memory: MiB, each for the whole job.
        types: the accelerator types that it accepts, an index into ``type_sets``; 0 is any.
        tenant: an index into ``tenants``.
        priority: higher goes first, in orders that use it.
    """

    submit: NDArray[np.float64]
    duration: NDArray[np.float64]
    gpus: NDArray[np.int64]
    id: Sequence[Any] = ()
    estimate: NDArray[np.float64] = FILLED
    pods: NDArray[np.int64] = FILLED
    milli: NDArray[np.int64] = FILLED
    gpu_memory: NDArray[np.float64] = FILLED
    cpu: NDArray[np.int64] = FILLED
    memory: NDArray[np.int64] = FILLED
    types: NDArray[np.int64] = FILLED
    tenant: NDArray[np.int64] = FILLED
    priority: NDArray[np.float64] = FILLED
    type_sets: tuple[tuple[str, ...], ...] = ((),)
    tenants: tuple[str, ...] = ("",)
    generated: bool = False
    dropped: dict[str, int] = field(default_factory=dict)  # reason → rows that the loader left out
    warnings: tuple[str, ...] = ()  # what the loader doubts, a sentence each
    epoch: float = math.nan  # the date of second 0, in seconds since 1970; NaN: unknown

    def __post_init__(self) -> None:
        count = len(self.submit)
        if not len(self.id):
            self.id = range(count)
        if len(self.id) != count:
            raise ValueError(f"jobs: 'id' has {len(self.id)} rows and 'submit' has {count}; expected the same")
        for name in self.columns():
            value = getattr(self, name)
            if value is None:
                value = self.duration if name == "estimate" else np.full(count, DEFAULTS[name])
            given = np.asarray(value)
            if given.ndim != 1:
                raise ValueError(f"jobs: column '{name}' has {given.ndim} dimensions; expected one")
            if given.dtype.kind == "f" and name not in FLOATS:
                wrong = np.flatnonzero(~((given == np.floor(given)) & (np.abs(given) < 2**62)))
                if len(wrong):
                    raise ValueError(
                        f"jobs: {name} of row {int(wrong[0])} is {given[wrong[0]]}; expected a whole number"
                    )
            value = np.ascontiguousarray(given, dtype=np.float64 if name in FLOATS else np.int64)
            if len(value) != count:
                raise ValueError(
                    f"jobs: column '{name}' has {len(value)} rows and 'submit' has {count}; expected the same"
                )
            setattr(self, name, value)
        for name in ("submit", "duration", "estimate", "gpus", "pods", "milli", "gpu_memory", "cpu", "memory"):
            column = getattr(self, name)
            wrong = np.flatnonzero(~(column >= 0) | ~np.isfinite(column))
            if len(wrong):
                row = int(wrong[0])
                raise ValueError(
                    f"jobs: {name} of job {self.id[row]!r} (row {row}) is {column[row]}; expected a finite number of 0 or more"
                )
        for name, there in (("types", self.type_sets), ("tenant", self.tenants)):
            column = getattr(self, name)
            if len(wrong := np.flatnonzero((column < 0) | (column >= len(there)))):
                row = int(wrong[0])
                raise ValueError(
                    f"jobs: {name} of job {self.id[row]!r} (row {row}) is {column[row]}; expected an index below {len(there)}"
                )
        for name in ("submit", "duration", "estimate"):
            if len(wrong := np.flatnonzero(getattr(self, name) > LATEST)):
                row = int(wrong[0])
                raise ValueError(
                    f"jobs: {name} of job {self.id[row]!r} (row {row}) is {getattr(self, name)[row]:g}; expected seconds, at "
                    f"most {LATEST:g}"
                )
        if len(wrong := np.flatnonzero((self.milli < 1) | (self.milli > WHOLE))):
            row = int(wrong[0])
            raise ValueError(
                f"jobs: milli of job {self.id[row]!r} (row {row}) is {self.milli[row]}; expected 1 to {WHOLE} thousandths"
            )
        for name, most in (("gpus", MOST_REQUESTED), ("pods", MOST_PODS)):
            if len(wrong := np.flatnonzero(getattr(self, name) > most)):
                row, many = int(wrong[0]), getattr(self, name)[wrong[0]]
                raise ValueError(
                    f"jobs: {name} of job {self.id[row]!r} (row {row}) is {many:,}; expected at most {most:,}"
                )
        uneven = np.flatnonzero((self.pods > 0) & (self.gpus % np.maximum(self.pods, 1) != 0))
        if len(uneven):
            row = int(uneven[0])
            raise ValueError(
                f"jobs: job {self.id[row]!r} (row {row}) has {self.gpus[row]} GPUs in {self.pods[row]} pods; "
                "expected equal pods"
            )
        if count and (self.submit[1:] < self.submit[:-1]).any():
            self.__dict__.update(self.take(np.argsort(self.submit, kind="stable")).__dict__)

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return ("submit", "duration", "gpus", "estimate", *DEFAULTS)

    def __len__(self) -> int:
        return len(self.submit)

    def __repr__(self) -> str:
        made = "generated " if self.generated else ""
        if not len(self):
            return f"<{type(self).__name__}: 0 {made}jobs>"
        tenants = f", {count(len(self.tenants), 'tenant')}" if len(self.tenants) > 1 else ""
        return (
            f"<{type(self).__name__}: {count(len(self), f'{made}job')}, submitted from {self.submit[0]:,.0f} to "
            f"{self.submit[-1]:,.0f} s, of {self.gpus.min():,} to {count(self.gpus.max(), 'GPU')}{tenants}>"
        )

    def take(self, rows: NDArray[Any]) -> "Jobs":
        """Those rows (indices or a mask), in that order when they are indices in order of submission."""
        rows = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows)
        picked = {name: getattr(self, name)[rows] for name in self.columns()}
        return Jobs(**{**vars(self), **picked, "id": [self.id[int(r)] for r in rows]})

    def read_only(self) -> "Jobs":
        """The same jobs, read-only: writing to a column is an error."""
        view = object.__new__(ReadOnlyJobs)
        columns = {name: getattr(self, name).view() for name in self.columns()}
        for column in columns.values():
            column.flags.writeable = False
        id = self.id if isinstance(self.id, range) else tuple(self.id)
        vars(view).update({**vars(self), **columns, "id": id, "dropped": dict(self.dropped)})
        return view


class ReadOnlyJobs(Jobs):
    """Of :meth:`Jobs.read_only`."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"jobs: '{name}' is read-only; an order returns sort keys, and changes no job")


def size_of(gpus: int, milli: int) -> int:
    """A piece's position in a node's ``mix``: shares, 1, 2, 4, 8, other."""
    if milli < WHOLE:
        return 0
    return {1: 1, 2: 2, 4: 3, 8: 4}.get(gpus, 5)


def racks_of(groups: Iterable[NodeGroup]) -> tuple[NDArray[np.int64], tuple[str, ...], NDArray[np.int64]]:
    """The rack of each node [N], an index into the names that come next, and its domain [N]; both by their first node.

    Raises:
        ValueError: a domain would be in several racks.
    """
    racks: dict[tuple[bool, str], int] = {}
    domains: dict[tuple[str, int], int] = {}
    cut: dict[str, int] = {}  # racks so far that groups of a name were cut into
    rack_of, domain_of = [], []
    for number, g in enumerate(groups):
        first = cut.get(g.name, 0)
        if g.rack_nodes:
            cut[g.name] = first + -(-g.count // g.rack_nodes)
        for i in range(g.count):
            rack = (True, f"{g.name}-rack-{first + i // g.rack_nodes}") if g.rack_nodes else (False, g.rack)
            domain = (g.nvlink_domain, -1)
            if g.nvlink_domain_nodes:
                domain = (f"{number}-{i // g.nvlink_domain_nodes}", number)
            elif not g.nvlink_domain:
                domain = (f"{number}-{i}", number)
            rack_of.append(racks.setdefault(rack, len(racks)))
            domain_of.append(domains.setdefault(domain, len(domains)))
    names = tuple(name for _, name in racks) or ("",)
    rack_of_domain: dict[int, int] = {}
    for d, r in zip(domain_of, rack_of, strict=True):
        if rack_of_domain.setdefault(d, r) != r:
            name = list(domains)[d][0]
            raise ValueError(
                f"nvlink_domain '{name}' is in racks '{names[rack_of_domain[d]]}' and '{names[r]}'; expected one rack"
            )
    return np.array(rack_of, np.int64), names, np.array(domain_of, np.int64)
