"""Tables of the cluster simulator's speed, and how its time grows, from the records of examples/simulator_speed.py."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.drawing.quantities import NONE, SPACE, distinct, figures, known
from weft.report.markdown import cell, grid

FILE = "simulate"  # of a machine's records
PLAIN = "GPUs"  # what jobs ask where a record does not say otherwise
LEAST_POINTS = 3  # of which a growth can be seen


@dataclass(frozen=True)
class Timed:
    """One order on one size, timed."""

    order: str
    placement: str
    jobs: int
    nodes: int
    load: float  # what the jobs ask of the cluster's GPUs in the long run, as a share
    asks: str  # what a job asks: ``GPUs``, or more
    cpu_s: float  # CPU seconds of the engine, median of three; compiling and metrics apart
    peak_memory_mib: float | None  # of the process; None where the system does not say
    machine: str
    commit: str
    time: str

    @property
    def policy(self) -> str:
        """The order, with the placement where it is not best fit, and what jobs ask where that is more than GPUs."""
        placed = "" if self.placement == "best" else f" {self.placement}"
        return self.order + placed + ("" if self.asks == PLAIN else f", jobs ask {self.asks}")

    @property
    def size(self) -> str:
        return f"{self.jobs:,} jobs × {self.nodes:,} nodes"


@dataclass(frozen=True)
class Growth:
    """One order's CPU seconds along a size while the other one is the same."""

    order: str
    along: str  # ``jobs`` or ``nodes``, what grows
    fixed: int  # how many there are of the other
    load: float  # what the jobs ask of the cluster's GPUs, as a share
    points: tuple[tuple[int, float], ...]  # (size, CPU seconds), by size

    @property
    def slope(self) -> float:
        """The least-squares slope of log seconds over log size: 1 is linear growth, 0 none."""
        x, y = ([math.log(value) for value in column] for column in zip(*self.points, strict=True))
        return statistics.linear_regression(x, y).slope

    @property
    def told(self) -> str:
        """The slope in writing."""
        return f"{self.slope:.2f}".replace("-", "−")

    @property
    def name(self) -> str:
        return f"{self.order}, {self.fixed:,} {'nodes' if self.along == 'jobs' else 'jobs'}"


def read(lines: Iterable[Mapping[str, Any]]) -> list[Timed]:
    """The newest record of every point; what is no record of this benchmark is passed over."""
    newest: dict[tuple[Any, ...], Timed] = {}
    for line in lines:
        numbers = [float(n or 0) if known(n) else 0.0 for n in map(line.get, ("jobs", "nodes", "load", "cpu_s"))]
        if line.get("benchmark") != "simulate" or min(numbers) <= 0:
            continue
        jobs, nodes, load, cpu_s = numbers
        memory = line.get("peak_memory_mib")
        words = {name: str(line.get(name) or "") for name in ("order", "placement", "machine", "commit", "time")}
        made = Timed(
            jobs=int(jobs),
            nodes=int(nodes),
            load=load,
            asks=str(line.get("asks") or PLAIN),
            cpu_s=cpu_s,
            peak_memory_mib=memory if known(memory) else None,
            **words,
        )
        newest[made.machine, made.order, made.placement, made.jobs, made.nodes, made.load, made.asks] = made
    return list(newest.values())


def of_one_machine(timed: Iterable[Timed], named: str = "") -> list[Timed]:
    """Those of the machine that is named, where there are any, else of the one that was measured last."""
    timed = list(timed)
    last = max(timed, key=lambda t: t.time, default=None)
    chosen = [t for t in timed if t.machine == named]
    return chosen or [t for t in timed if last is not None and t.machine == last.machine]


def by_policy(timed: Iterable[Timed]) -> dict[str, dict[float, Timed]]:
    """Policy → load → the largest run (most jobs, then most nodes); policies in the order of the records."""
    found: dict[str, dict[float, Timed]] = {}
    for t in timed:
        loads = found.setdefault(t.policy, {})
        if t.load not in loads or (t.jobs, t.nodes) > (loads[t.load].jobs, loads[t.load].nodes):
            loads[t.load] = t
    return found


def speed(timed: Iterable[Timed]) -> tuple[str, list[float], list[tuple[str, list[str], str]]]:
    """What the table of speeds shows: the largest size, the loads, and for each policy its CPU seconds at each load,
    which name their size where it is another one, and the peak memory in MiB."""
    policies = by_policy(timed)
    every = [t for loads in policies.values() for t in loads.values()]
    if not every:
        return "", [], []
    size = max(every, key=lambda t: (t.jobs, t.nodes)).size

    def taken(t: Timed | None) -> str:
        return NONE if t is None else figures(t.cpu_s) + (f" ({t.size})" if t.size != size else "")

    loads = sorted({t.load for t in every})
    rows = []
    for policy, of in policies.items():
        peak = max((t.peak_memory_mib or 0.0 for t in of.values() if t.size == size), default=0.0)
        rows.append((policy, [taken(of.get(load)) for load in loads], figures(peak) if peak else NONE))
    return size, loads, rows


def growth(timed: Iterable[Timed], along: str) -> list[Growth]:
    """Every order's growth with jobs or with nodes, by order, the largest first.

    Of best fit and jobs that ask GPUs only, at the load that was measured at the most sizes.
    """
    plain = [t for t in timed if t.asks == PLAIN and t.placement == "best"]
    load = statistics.mode(t.load for t in plain) if plain else 0.0
    groups: dict[tuple[str, int], dict[int, float]] = {}
    for t in plain:
        if t.load == load:
            size, fixed = (t.jobs, t.nodes) if along == "jobs" else (t.nodes, t.jobs)
            groups.setdefault((t.order, fixed), {})[size] = t.cpu_s
    found = [
        Growth(order, along, fixed, load, tuple(sorted(points.items())))
        for (order, fixed), points in groups.items()
        if len(points) >= LEAST_POINTS
    ]
    orders = distinct(g.order for g in found)
    return sorted(found, key=lambda g: (orders.index(g.order), -g.fixed))


def speed_table(timed: Iterable[Timed]) -> str:
    """A row for each policy in Markdown, a column of CPU seconds for each load."""
    timed = list(timed)
    size, loads, rows = speed(timed)
    if not rows:
        return "*No measurements yet.*"
    head = [size, *(f"CPU s at {load_of(load)} load" for load in loads), "peak memory, MiB"]
    body = [[cell(policy), *taken, peak] for policy, taken, peak in rows]
    shown = [t for of in by_policy(timed).values() for t in of.values()]
    return "\n".join([grid(head, body, numbers_from=1), "", provenance(shown)])


def growth_table(timed: Iterable[Timed]) -> str:
    """A row for each size in Markdown, a column of CPU seconds for each order, and the slopes."""
    timed = list(timed)
    found = [*growth(timed, "jobs"), *growth(timed, "nodes")]
    if not found:
        return "*No measurements yet.*"
    orders = distinct(g.order for g in found)
    rows: dict[tuple[int, int], dict[str, float]] = {}
    for g in found:
        for at, seconds in g.points:
            jobs, nodes = (at, g.fixed) if g.along == "jobs" else (g.fixed, at)
            rows.setdefault((jobs, nodes), {})[g.order] = seconds
    body = [
        [f"{jobs:,}", f"{nodes:,}", *(figures(rows[jobs, nodes].get(order)) for order in orders)]
        for jobs, nodes in sorted(rows, key=lambda size: size[::-1])
    ]
    table = grid(["jobs", "nodes", *(f"{order}, CPU s" for order in orders)], body, numbers_from=0)
    told = [
        f"with {along} " + ", ".join(f"{g.told} ({g.name})" for g in found if g.along == along)
        for along in distinct(g.along for g in found)
    ]
    slopes = f"At {load_of(found[0].load)} load. Slopes, 1 being linear growth: {'; '.join(told)}."
    shown = [t for t in timed if t.order in orders and t.load == found[0].load and (t.jobs, t.nodes) in rows]
    return "\n".join([table, "", slopes, "", provenance(shown)])


def load_of(share: float) -> str:
    return f"{100 * share:g}{SPACE}%"


def provenance(timed: Iterable[Timed]) -> str:
    """Machine, commit and date of what stands above; several where they differ."""
    return f"<sub>{cell(' · '.join(about(timed)))}</sub>"


def about(timed: Iterable[Timed]) -> list[str]:
    timed = list(timed)
    dates = sorted({t.time[:10] for t in timed if t.time})
    commits = distinct(t.commit for t in timed)
    parts = [
        " / ".join(distinct(t.machine for t in timed)),
        f"commit {' / '.join(commits)}" if commits else "",
        f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else "".join(dates),
        "CPU seconds of the engine, medians of three, compiling and metrics apart",
    ]
    return [part for part in parts if part]
