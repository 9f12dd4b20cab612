"""What ``weft list``, ``bench`` and ``tune`` do: describe operators, run a bench or a tuning."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from weft import registry
from weft.bench.resume import left
from weft.bench.terminal import progress
from weft.definition import UnknownName
from weft.hardware import query
from weft.records import Measurement, Saver, Store, commit


def describe(names: Iterable[str]) -> list[dict[str, Any]]:
    """Operators, implementations, directions and workloads, for ``weft list``."""
    return [
        {
            "name": op.name,
            "family": registry.family(op.name),
            "axes": dict(op.axes),
            "directions": list(op.directions),
            "dtypes": list(op.dtypes),
            "implementations": [
                {"name": i.name, "backend": i.backend, "ours": i.ours, "arch": i.arch, "ladder": i.rung, "idea": i.idea}
                for i in op.implementations.values()
            ],
            "workloads": {name: [str(w) for w in items] for name, items in op.workloads.items()},
            "mutants": [m.name for m in op.mutants],
        }
        for op in registry.select(names)
    ]


# ---- running ---------------------------------------------------------------------------------------------------------


def run_bench(
    names: Iterable[str],
    device: str,
    note: Console,
    *,
    which: str = "bench",
    workload: str = "",
    dtypes: Sequence[str] = (),
    directions: Sequence[str] = (),
    implementations: Sequence[str] = (),
    ladder: bool = False,
    cold: bool = True,
    budget_s: float = 0.5,
    saver: Saver | None = None,
    resume: bool = False,
    jobs: int = 1,
) -> list[Measurement]:
    """Measures ceilings, then every point. Records are saved as they come; Ctrl-C keeps what was measured.

    ``jobs``: processes that compile and check, of which one at a time measures.
    """
    from weft.bench import compare, transfers
    from weft.hardware import ceilings

    operators = registry.select(names)
    dtypes, directions = tuple(dict.fromkeys(dtypes)), tuple(dict.fromkeys(directions))
    for direction in directions:
        if direction not in ("forward", "backward"):
            raise UnknownName("direction", direction, ("forward", "backward"))
    if device == "cuda" or workload:
        points = list(compare.points(operators, which, dtypes=dtypes, directions=directions, workload=workload))
    else:
        points = list(cpu_points(operators, which, dtypes, directions))
    chosen = {op.name: registry.implementations(op, implementations, ladder=ladder) for op in operators}
    say = sayer(note)
    if not points:
        raise ValueError(_nothing(operators, device, which, dtypes, directions, workload))
    if saver:
        saver.store.probe(query.name(device))
    limits = ceilings.measure(device, say=say)
    bench = compare.Bench(device, limits, cold=cold, budget_s=budget_s, say=say)
    measured: list[Measurement] = []

    def keep(rows: Iterable[Measurement]) -> None:
        for row in rows:
            measured.append(row)
            if saver:
                saver(row)

    keep(ceilings.as_records(limits, bench.context()))
    if resume:
        points = left(points, chosen, bench, Store())
    try:
        for rows in measure_points(bench, points, chosen, note, jobs=jobs):
            keep(rows)
        for op in operators if not (workload or directions or implementations) else ():
            if "transfers" in op.workloads:
                keep(transfers.measure(bench, op))
    except KeyboardInterrupt:
        note.print(f"interrupted: {len(measured)} measurements are kept")
    return measured


def sayer(note: Console) -> Callable[[str], None]:
    """Prints each text once."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            note.print(text, style="dim", soft_wrap=True)

    return say


def measure_points(
    bench: Any,
    points: Sequence[Any],
    chosen: Mapping[str, Sequence[Any]],
    note: Console,
    *,
    jobs: int = 1,
    limit_s: float = math.inf,
) -> Iterator[list[Measurement]]:
    """The records of each point, in the order of the points (with several ``jobs``, as they come), until ``limit_s`` seconds
    are over.

    Args:
        bench: a :class:`weft.bench.compare.Bench`.
        points: operator, workload and direction.
        chosen: the implementations of each operator, by its name.
    """
    from weft.bench import parallel

    def one_by_one() -> Iterator[tuple[Any, list[Measurement]]]:
        for op, w, direction in points:
            yield (op, w, direction), bench.compare(op, w, direction, chosen[op.name])
            bench.free()

    end = time.perf_counter() + limit_s
    several = jobs > 1 and len(points) > 1
    with progress(note, "bench", len(points)) as step:
        for done, ((op, w, direction), rows) in enumerate(
            parallel.compare(bench, points, chosen, jobs) if several else one_by_one(), 1
        ):
            step(f"{op.name} {direction} {w} {w.dtype}")
            yield rows
            if time.perf_counter() > end and done < len(points):
                note.print(f"{limit_s:.0f} s are over: {len(points) - done} of {len(points)} points left out")
                return


QUICK_CPU_FLOPS = 4e9  # what a quick run gives a CPU at most in one call: 1024³ and below


def cpu_points(operators: list[Any], which: str, dtypes: Sequence[str], directions: Sequence[str]) -> Iterator[Any]:
    """On a CPU the sets ``bench`` and ``quick`` are the set ``cpu``: larger than caches, forward, fp32 unless asked."""
    from weft.bench import compare

    chosen = "cpu" if which in ("bench", "quick") else which
    having = [op for op in operators if chosen != "cpu" or chosen in op.workloads]
    if not having:
        return
    for op, w, direction in compare.points(
        having, chosen, dtypes=dtypes or ["fp32"], directions=directions or ["forward"]
    ):
        if which != "quick" or op.cost(w, direction).flops <= QUICK_CPU_FLOPS:
            yield op, w, direction


def _nothing(
    operators: list[Any], device: str, which: str, dtypes: Sequence[str], directions: Sequence[str], workload: str
) -> str:
    """Why there is no point to measure, and what would be one."""
    names = ", ".join(op.name for op in operators)
    if directions and not any(d in op.directions for op in operators for d in directions):
        there = dict.fromkeys(d for op in operators for d in op.directions)
        return f"nothing to measure: {names} {'has' if len(operators) == 1 else 'have'} the direction {', '.join(there)} only"
    which = "cpu" if device == "cpu" and which in ("bench", "quick") else which
    if which == "cpu" and not workload and not any(op.workloads.get(which) for op in operators):
        return (
            f"nothing to measure on a CPU: {names} {'has' if len(operators) == 1 else 'have'} no sizes for one; "
            f"give a point, as --workload {operators[0].example}, or run it where a GPU is"
        )
    if there := dict.fromkeys(w.dtype for op in operators for w in op.workloads.get(which, ()) if w.dtype):
        asked = ", ".join(dtypes) or "fp32, which a CPU is asked for unless --dtype says otherwise"
        return f"nothing to measure: the set '{which}' of {names} is in {', '.join(there)}, not in {asked}"
    return f"nothing to measure: {names} {'has' if len(operators) == 1 else 'have'} no such set or dtype"


def run_host(names: Iterable[str], device: str, *, saver: Saver | None = None) -> list[Measurement]:
    """Measures what a call costs on the host.

    Raises:
        ValueError: there is no GPU, so nothing is launched.
    """
    operators = registry.select(names)
    if device != "cuda":
        raise ValueError("weft bench --host times launches, and PyTorch sees no GPU here (weft doctor says why)")
    from weft.bench import host
    from weft.bench.compare import Bench
    from weft.hardware.ceilings import Ceilings

    measured = []
    for m in host.measure(Bench(device, Ceilings(device)), operators):
        measured.append(m)
        if saver:
            saver(m)
    return measured


def run_random(
    names: Iterable[str],
    device: str,
    note: Console,
    *,
    count: int,
    seed: str = "",
    dtypes: Sequence[str] = (),
    directions: Sequence[str] = (),
    budget_s: float = 0.5,
    saver: Saver | None = None,
    jobs: int = 1,
) -> list[Measurement]:
    """Measures public functions at random points against the best peer. What was measured before Ctrl-C, or before a process
    died, is kept.

    Args:
        seed: decimal, or hexadecimal with 0x; empty for the first 8 hexadecimal digits of the commit.

    Raises:
        ValueError: there is no GPU, or no commit to take a seed from.
    """
    operators = registry.select(names)
    number = seed_of(seed)
    if device != "cuda":
        raise ValueError("weft bench --random times a GPU, and PyTorch sees none here (weft doctor says why)")
    from weft.bench import compare, parallel, random_points
    from weft.hardware import ceilings

    points = random_points.draw(operators, count, number, dtypes, directions)
    if saver:
        saver.store.probe(query.name(device))
    say = sayer(note)
    bench = compare.Bench(device, ceilings.measure(device, say=say), quick=True, budget_s=budget_s, say=say)
    chosen = random_points.chosen(operators)
    note.print(f"{len(points)} points of seed {number:#x}")

    def timed(some: Sequence[Any]) -> Iterator[list[Measurement]]:
        try:
            yield from measure_points(bench, some, chosen, note, jobs=jobs)
        except parallel.ProcessDied as died:
            note.print(f"{died}: the points before are kept")

    measured = random_points.measure(points, number, timed)
    if missing := len({*map(random_points.key_of, points)}) - len(measured):
        note.print(f"{missing} points have no ratio: a call failed or was wrong, or no peer took it")
    if saver:
        for m in measured:
            saver(m)
    return measured


def seed_of(text: str) -> int:
    """A seed in decimal or 0x…; of an empty text the first 8 hexadecimal digits of the commit.

    Raises:
        ValueError: it is no number, or there is no commit.
    """
    try:
        return int(text, 0) if text else int(commit()[:8], 16)
    except ValueError:
        what = f"--seed is {text!r}" if text else "there is no commit to take a seed from"
        raise ValueError(f"{what}; expected a whole number, as 7 or 0x1f2e3d4c") from None


def run_tune(
    names: Iterable[str],
    device: str,
    out: Console,
    dtypes: Sequence[str],
    implementation: str,
    directions: Sequence[str],
    kernels: Sequence[str],
    processes: int,
) -> None:
    """Tunes the named operators on this card.

    Raises:
        ValueError: there is no GPU.
    """
    operators = registry.select(names)
    if device != "cuda":
        raise ValueError("weft tune measures a GPU, and PyTorch sees none here (weft doctor says why)")
    import torch

    from weft.bench import tune

    major, minor = torch.cuda.get_device_capability()

    def report(key: str, config: dict[str, int], best: float, heuristic: float) -> None:
        out.print(f"{key}: {json.dumps(config)} {best:.1f} us, heuristic {heuristic:.1f} us", soft_wrap=True)

    jobs = list(tune.jobs(operators, dtypes, implementation, directions))
    tune.tune(jobs, major * 10 + minor, kernels=kernels, processes=processes, on_result=report)
