"""What the command line prints: tables, and a progress bar on a terminal."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from weft.bench import random_points
from weft.records import Measurement


def _table(title: str) -> Table:
    """Narrow enough for 80 columns: a rule under the head alone, one space (of the box) between columns."""
    return Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)


@contextlib.contextmanager
def progress(console: Console, what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; nothing where standard error is not one. Yields a function to call with each step."""
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.fields[at]}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total, at="")
        yield lambda at: bar.update(task, advance=1, at=at[:40])


def print_verification(out: Console, found: dict[str, Any]) -> None:
    table = _table(f"Verification against float64 ({found['device']})")
    for column in ("operator", "implementation", "direction"):
        table.add_column(column, overflow="fold")
    for column in ("pass", "fail", "worst"):
        table.add_column(column, justify="right")
    table.add_column("not\nverifiable")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for r in found["results"]:
        groups.setdefault((r["operator"], r["implementation"], r["direction"]), []).append(r)
    for key, rows in groups.items():
        count = {s: sum(r["status"] == s for r in rows) for s in ("pass", "fail", "declined", "unverifiable")}
        worst = max((r["error"] for r in rows if r["error"] is not None and r["status"] != "declined"), default=None)
        blind = " ".join(sorted({r["dtype"] for r in rows if r["status"] == "unverifiable"}))
        table.add_row(
            *key,
            str(count["pass"]),
            str(count["fail"]),
            "–" if worst is None else f"{worst:.2f}",
            blind or "–",
        )
    out.print(table)
    out.print("worst: the largest error as a share of what is allowed", style="dim")
    for r in found["results"]:
        if r["status"] == "fail":
            out.print(
                f"FAIL {r['operator']} {r['implementation']} {r['direction']} {r['workload']} {r['dtype']}: {r['reason']}",
            )
            if r["reproduce"]:
                out.print(f"     {r['reproduce']}", soft_wrap=True)
    rejected = found["mutants"] - found["mutants_survived"]
    left = f", {found['not_reached']} not reached in the time budget (--full runs them)" if found["not_reached"] else ""
    untried = f", {found['mutants_not_reached']} not tried" if found["mutants_not_reached"] else ""
    out.print(
        f"{found['checked']} checked, {found['failed']} failed, {found['declined']} declined, "
        f"{found['unverifiable']} not verifiable here{left}; {rejected} of {found['mutants']} mutants rejected{untried}",
    )


def print_compiled(out: Console, found: dict[str, Any]) -> None:
    table = _table("Compiled without a GPU")
    for column in ("operator", "imple-\nmentation", "arch"):
        table.add_column(column, overflow="fold")
    for column in ("kernels", "regs", "shared\nKiB", "of", "spills", "failed"):
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
        table = _table(f"{operator} {direction}, {rows[0].cache} cache")
        for column in ("workload", "dtype", "implementation"):
            table.add_column(column, overflow="fold")
        for column in ("µs", "of ceiling", "to best peer (p20–p80)"):
            table.add_column(column, justify="right")
        previous = None
        for m in rows:
            point = (m.workload, m.dtype)
            share = "–" if m.share_of_ceiling is None else f"{m.share_of_ceiling:.1%}"
            ratio = "–" if m.ratio_to_best_peer is None else f"{m.ratio_to_best_peer:.3f}×"
            if m.ratio_p20 is not None and m.ratio_p80 is not None:
                ratio += f" ({m.ratio_p20:.2f}–{m.ratio_p80:.2f})"
            first = point if point != previous else ("", "")
            table.add_row(*first, m.implementation, _us(m.time_us), share, ratio, style="bold" if m.ours else None)
            previous = point
        out.print(table)
    if not groups:
        out.print("nothing was measured: every implementation was left out, for the reasons above")
    elif measured:
        m = measured[0]
        versions = ", ".join(f"{name} {number}" for name, number in m.versions.items())
        caption = f"medians; {m.gpu}; {versions}" + (f"; commit {m.commit}" if m.commit else "")
        out.print(caption, style="dim")


def _us(value: float) -> str:
    """Four significant digits: what a median is worth."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def operators_table(described: Iterable[dict[str, Any]]) -> Table:
    table = _table("")
    table.add_column("operator", no_wrap=True)  # users paste it into other commands: never cut it in a narrow terminal
    table.add_column("axes")
    table.add_column("directions", width=10)
    table.add_column("implementations", min_width=15)
    for op in described:
        usable = ", ".join(i["name"] for i in op["implementations"] if i["ladder"] is None)
        rungs = sum(i["ladder"] is not None for i in op["implementations"])
        axes = ", ".join(f"{axis} {meaning}" for axis, meaning in op["axes"].items())
        more = f" and a ladder of {rungs}" if rungs else ""
        table.add_row(op["name"], axes, ", ".join(op["directions"]), usable + more)
    return table


def print_random(out: Console, measured: Sequence[Measurement]) -> None:
    """The distribution of ratios to the best peer, and the points that are furthest behind."""
    if not measured:
        out.print("nothing was measured: no point had a peer that ran")
        return
    table = _table("Random points: public functions against the best peer")
    table.add_column("family")
    for column in ("points", "within 3 %", "geometric\nmean", "median", "least", "host µs"):
        table.add_column(column, justify="right")
    families = random_points.by_family(measured)
    for family, rows in (*families.items(), ("all", list(measured))):
        d = random_points.distribution(rows)
        cells = f"{d['level_or_ahead']:.0%}", *(f"{d[name]:.2f}" for name in ("geometric_mean", "median", "least"))
        table.add_row(
            family, str(d["points"]), *cells, f"{d['host_us']:.1f}", style="bold" if family == "all" else None
        )
    out.print(table)
    for m in random_points.worst(measured):
        out.print(
            f"{m.ratio_to_best_peer:.2f}  {m.operator} {m.direction} {m.dtype} {m.workload}  ({m.best_peer})",
            soft_wrap=True,
        )  # fmt: skip


def host_table(measured: Iterable[Measurement]) -> Table:
    table = _table("Host time of a call")
    for column in ("operator", "call"):
        table.add_column(column)
    for column in ("us", "of a bare launch"):
        table.add_column(column, justify="right")
    for m in measured:
        ratio = m.details.get("ratio_to_bare_launch")
        row = (m.operator, m.implementation, f"{m.time_us:.2f}", f"{ratio:.2f}" if ratio else "–")
        table.add_row(*row, style="bold" if m.ours else None)
    return table
