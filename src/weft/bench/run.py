"""What the verbs of the command line do with the rooms: run a whole bench, a tuning, a report; and how results are printed."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from weft import records, registry
from weft.definition import UnknownName
from weft.records import Measurement, Store

# ---- printing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(console: Console, what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; nothing where standard error is not one. Yields a function to be told of each step."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.fields[at]}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total, at="")
        yield lambda at: bar.update(task, advance=1, at=at[:40])


def print_verification(out: Console, found: dict[str, Any]) -> None:
    table = Table(title=f"Verification against float64 ({found['device']})", title_justify="left")
    for column in ("operator", "implementation", "direction"):
        table.add_column(column, overflow="fold")
    for column in ("pass", "fail", "declined", "worst", "not verifiable"):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in found["results"]:
        groups.setdefault((r["operator"], r["implementation"], r["direction"]), []).append(r)
    for key, rows in groups.items():
        count = {s: sum(r["status"] == s for r in rows) for s in ("pass", "fail", "declined", "unverifiable")}
        worst = max((r["error"] for r in rows if r["error"] is not None and r["status"] != "declined"), default=None)
        blind = ", ".join(sorted({r["dtype"] for r in rows if r["status"] == "unverifiable"}))
        table.add_row(
            *key,
            str(count["pass"]),
            str(count["fail"]),
            str(count["declined"]),
            "–" if worst is None else f"{worst:.2f}",
            blind or "–",
        )
    out.print(table)
    out.print("worst: the largest error as a share of what is allowed", style="dim")
    for r in found["results"]:
        if r["status"] == "fail":
            out.print(
                f"FAIL {r['operator']} {r['implementation']} {r['direction']} {r['workload']} {r['dtype']}: {r['reason']}",
                markup=False,
            )
            if r["reproduce"]:
                out.print(f"     {r['reproduce']}", markup=False, soft_wrap=True)
    rejected = found["mutants"] - found["mutants_survived"]
    left = f", {found['not_reached']} not reached in the time budget (--full runs them)" if found["not_reached"] else ""
    out.print(
        f"{found['checked']} checked, {found['failed']} failed, {found['declined']} declined, "
        f"{found['unverifiable']} not verifiable here{left}; {rejected} of {found['mutants']} mutants rejected",
        markup=False,
    )


def print_compiled(out: Console, found: dict[str, Any]) -> None:
    table = Table(title="Compiled without a GPU", title_justify="left")
    for column in ("operator", "implementation", "architecture"):
        table.add_column(column)
    for column in ("kernels", "registers", "shared KiB", "of", "spills", "failed"):
        table.add_column(column, justify="right")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in found["results"]:
        groups.setdefault((r["operator"], r["implementation"], r["arch"]), []).append(r)
    for key, rows in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1], int(g[0][2][3:]))):
        shared = max(r["shared_bytes"] for r in rows)
        table.add_row(
            *key,
            str(len(rows)),
            str(max(r["registers"] for r in rows)),
            f"{shared / 1024:.0f}",
            f"{max(r['shared_limit'] for r in rows) / 1024:.0f}",
            str(max(r["spills"] for r in rows)),
            str(sum(not r["ok"] for r in rows)),
        )
    out.print(table)
    for r in found["results"]:
        if not r["ok"]:
            out.print(
                f"FAIL {r['operator']} {r['implementation']} {r['workload']} {r['dtype']} {r['arch']}: {r['reason']}",
                markup=False,
            )
    out.print(
        f"{found['compiled']} kernels compiled in {found['seconds']} s, {found['failed']} failed, "
        f"{found['with_spills']} with spills (bytes of stack a thread)"
    )


def print_measurements(out: Console, measured: Sequence[Measurement]) -> None:
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in measured:
        if m.metric == "time":
            groups.setdefault((m.operator, m.direction), []).append(m)
    for (operator, direction), rows in groups.items():
        table = Table(title=f"{operator} {direction}, {rows[0].cache} cache", title_justify="left")
        for column in ("workload", "dtype", "implementation"):
            table.add_column(column)
        for column in ("µs", "of ceiling", "to best peer"):
            table.add_column(column, justify="right")
        previous = None
        for m in rows:
            point = (m.workload, m.dtype)
            share = "–" if m.share_of_ceiling is None else f"{m.share_of_ceiling:.1%}"
            ratio = "–" if m.ratio_to_best_peer is None else f"{m.ratio_to_best_peer:.3f}×"
            first = point if point != previous else ("", "")
            table.add_row(*first, m.implementation, f"{m.time_us:.2f}", share, ratio, style="bold" if m.ours else None)
            previous = point
        out.print(table)
    if not groups:
        out.print("nothing was measured")


def ceilings_table(measured: Iterable[Measurement]) -> Table:
    table = Table(title="Measured ceilings", title_justify="left")
    table.add_column("ceiling")
    table.add_column("rate", justify="right")
    for m in measured:
        scale, unit = (1e12, "T" + m.unit) if m.details["value"] > 1e12 else (1e9, "G" + m.unit)
        table.add_row(m.implementation, f"{m.details['value'] / scale:.2f} {unit}")
    return table


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


def operators_table(described: Iterable[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("operator", "axes", "directions", "implementations"):
        table.add_column(column)
    for op in described:
        usable = ", ".join(i["name"] for i in op["implementations"] if i["ladder"] is None)
        rungs = sum(i["ladder"] is not None for i in op["implementations"])
        axes = ", ".join(f"{axis} {meaning}" for axis, meaning in op["axes"].items())
        more = f" and a ladder of {rungs}" if rungs else ""
        table.add_row(op["name"], axes, ", ".join(op["directions"]), usable + more)
    return table


# ---- running ---------------------------------------------------------------------------------------------------------


def start(
    device: str,
    *,
    quick: bool = False,
    cold: bool = True,
    budget_s: float = 0.5,
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """A bench on this machine, its ceilings measured."""
    from weft.bench.compare import Bench
    from weft.hardware import ceilings

    measured = ceilings.measure(device, quick=quick, on_step=lambda name: say(f"ceiling: {name}"))
    return Bench(device, measured, cold=cold, budget_s=budget_s, say=say)


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
    save: bool = False,
    resume: bool = False,
    quick: bool = False,
) -> list[Measurement]:
    """Measures ceilings, then every point. Records are saved as they come; Ctrl-C keeps what was measured."""
    from weft.bench import compare, transfers

    operators = registry.select(names)
    for direction in directions:
        if direction not in ("forward", "backward"):
            raise UnknownName("direction", direction, ("forward", "backward"))
    if device == "cuda" or workload:
        points = list(compare.points(operators, which, dtypes=dtypes, directions=directions, workload=workload))
    else:
        points = list(_cpu_points(operators, "cpu" if which == "bench" else which, dtypes, directions))
    chosen = {op.name: registry.implementations(op, implementations, ladder=ladder) for op in operators}
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            note.print(text, style="dim", markup=False, soft_wrap=True)

    bench = start(device, quick=quick, cold=cold, budget_s=budget_s, say=say if not quick else lambda text: None)
    store = Store() if save else None
    measured: list[Measurement] = []

    def keep(rows: Iterable[Measurement]) -> None:
        for row in rows:
            measured.append(row)
            if store:
                store.append(row.gpu, row.operator, row)

    keep(bench.ceiling_records())
    done = _known(Store(), bench) if resume else set()
    with progress(note, "bench", len(points)) as step:
        try:
            for op, w, direction in points:
                step(f"{op.name} {direction} {w} {w.dtype}")
                if (op.name, str(w), w.dtype, direction, records.source_hash(op.folder)) in done:
                    continue
                keep(bench.compare(op, w, direction, chosen[op.name]))
                bench.free()
            if not workload and any(op.name == "matmul" for op in operators) and not directions and not implementations:
                step("matmul: CPU and GPU")
                keep(transfers.measure(bench, quick=quick))
        except KeyboardInterrupt:
            note.print(f"interrupted: {len(measured)} measurements are kept", markup=False)
    return measured


def _cpu_points(
    operators: Iterable[Any], which: str, dtypes: Sequence[str], directions: Sequence[str]
) -> Iterator[Any]:
    from weft.bench import compare

    operators = list(operators)
    known = {name for op in operators for name in op.workloads}
    if which not in {*known, "cpu"}:
        raise UnknownName("workload set", which, known)
    for op in operators:
        name = which if which in op.workloads else "quick"
        yield from compare.points([op], name, dtypes=dtypes or ["fp32"], directions=directions or ["forward"])


def _known(store: Store, bench: Any) -> set[tuple[str, ...]]:
    gpu = bench.context()["gpu"]
    return {
        (m.operator, m.workload, m.dtype, m.direction, m.source)
        for m in store.read(gpu)
        if m.cache == bench.timer.cache
    }


def run_tune(
    names: Iterable[str],
    device: str,
    out: Console,
    dtypes: Sequence[str],
    implementation: str,
    processes: int,
) -> None:
    """Tunes the named operators on this card.

    Raises:
        ValueError: there is no GPU.
    """
    if device != "cuda":
        raise ValueError("weft tune measures a GPU, and PyTorch sees none here (weft doctor says why)")
    import torch

    from weft.bench import tune

    major, minor = torch.cuda.get_device_capability()

    def said(key: str, config: dict[str, int], best: float, heuristic: float) -> None:
        out.print(
            f"{key}: {json.dumps(config)} {best:.1f} us, heuristic {heuristic:.1f} us", markup=False, soft_wrap=True
        )

    jobs = list(tune.jobs(registry.select(names), dtypes, implementation))
    tune.tune(jobs, major * 10 + minor, processes=processes, on_result=said)


def run_report(device: str, note: Console, folder: Path) -> Path:
    """Verifies, measures quickly, trains a first model and renders ``folder/index.html``."""
    from weft.bench import verify
    from weft.hardware import doctor, query
    from weft.report import page
    from weft.train import digits

    def stage(text: str) -> None:
        note.print(f"[{time.perf_counter() - begin:6.1f} s] {text}", markup=False)

    begin = time.perf_counter()
    stage("doctor")
    findings = [asdict(f) for f in doctor.examine("quick")]
    stage("verify: every kernel of ours against float64" + ("" if device == "cuda" else ", in Triton's interpreter"))
    with progress(note, "verify") as step:
        found = verify.verify(
            registry.select(),
            device,
            budget_s=60 if device == "cuda" else 90,
            on_result=lambda r: step(f"{r.operator} {r.workload}"),
        )
    compiled: list[dict[str, Any]] = []
    if device == "cpu":
        stage("compile: every kernel for real architectures")
        compiled = _compile_elsewhere()
    stage("measure: ceilings and a quick bench")
    measured = run_bench([], device, note, which="quick", budget_s=0.2, quick=True)
    stage("train: a small convolutional network on real digits")
    trained = digits.train(device=device)
    contents = page.Contents(
        machine=query.machine(device),
        ceilings=[m for m in measured if m.operator == "ceiling"],
        verification=found,
        measurements=[m for m in measured if m.operator != "ceiling"],
        compiled=compiled,
        training=asdict(trained),
        findings=findings,
    )
    path = page.render(contents, folder / "index.html")
    stage("rendered")
    return path


def _compile_elsewhere() -> list[dict[str, Any]]:
    """Compiles in another process: one that interprets cannot. Only the first and the newest architecture."""
    import os
    import subprocess
    import sys

    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryFile("w+") as file:
        command = [sys.executable, "-m", "weft", "compile-check", "--json", "--arch", "sm_80", "--arch", "sm_90"]
        subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, env=env, timeout=240)
        file.seek(0)
        try:
            return json.load(file)["results"]
        except (json.JSONDecodeError, KeyError):
            return []
