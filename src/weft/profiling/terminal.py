"""Profiles in the terminal, within 80 columns."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from weft.drawing.quantities import NONE, figures, percent, si
from weft.profiling.tables import Profile
from weft.words import count

MOST_ROWS = 20


def table(title: str, *columns: str) -> Table:
    """Columns whose name begins with ``>`` are numbers."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        numbers = name.startswith(">")
        made.add_column(
            name.lstrip(">"),
            justify="right" if numbers else "left",
            overflow="ellipsis" if not numbers else "fold",
            no_wrap=True,
        )
    return made


def print_profiles(out: Console, profiles: Sequence[Profile]) -> None:
    """Of several (the ranks of a job, say) a line each, then the slowest one."""
    slowest = max(profiles, key=lambda p: p.window_us / p.repeats)
    if len(profiles) > 1:
        ranks = table("Traces", "trace", ">rank", ">steps", ">ms a step", ">busy")
        for p in profiles:
            ms, busy = figures(p.window_us / p.repeats / 1e3), percent(p.busy_us / p.window_us)
            ranks.add_row(p.source, NONE if p.rank is None else str(p.rank), str(len(p.steps)), ms, busy)
        out.print(ranks)
    _print(out, slowest)


def _print(out: Console, p: Profile) -> None:
    each = "a step" if p.steps else "in all"
    ms = p.window_us / p.repeats / 1e3
    device = p.gpu or ("GPU" if p.device == "cuda" else "CPU")
    out.print(
        f"{p.source}: {device}, {count(len(p.steps), 'step')}, {figures(ms)} ms {each}, "
        f"busy {percent(p.busy_us / p.window_us)}, {figures(p.launches / p.repeats)} launches {each}"
    )
    ms_each = "ms/step" if p.steps else "ms"
    rows = table("Operators", "operator", "phase", ">calls", f">{ms_each}", ">share", ">rate", ">limit")
    for row in p.rows[:MOST_ROWS]:
        rate = si(row.flops_per_s, "FLOP/s") if row.flops_per_s else si(row.bytes_per_s, "B/s")
        rows.add_row(
            _short(f"{row.operator} {row.dtype} {row.module}"),
            row.phase,
            str(row.calls),
            figures(row.time_us / p.repeats / 1e3),
            percent(row.share),
            rate,
            percent(row.share_of_ceiling),
        )
    out.print(rows)
    if len(p.rows) > MOST_ROWS:
        out.print(
            f"… and {len(p.rows) - MOST_ROWS} more, {percent(sum(r.share for r in p.rows[MOST_ROWS:]))} of the time"
        )
    if p.steps:
        steps = table(
            "Steps", "step", ">ms", ">busy ms", ">idle ms", ">kernels", ">launches", ">loader ms", ">peak MiB"
        )
        for s in p.steps[:MOST_ROWS]:
            steps.add_row(
                s.name,
                *(figures(us / 1e3) for us in (s.wall_us, s.busy_us, s.idle_us)),
                str(s.kernels),
                str(s.launches),
                figures(s.data_loader_us / 1e3),
                figures(s.peak_bytes / 2**20) if s.peak_bytes else NONE,
            )
        out.print(steps)
    if p.idle:
        idle = table("The GPU was idle", "cause", f">{ms_each}", ">gaps", "mostly at")
        for i in p.idle:
            idle.add_row(
                i.cause, figures(i.time_us / p.repeats / 1e3), str(i.gaps), _short(i.what[0][0], 40) if i.what else ""
            )
        out.print(idle)
    if p.copies:
        copies = table("Copies", "kind", "host memory", ">count", ">MB", f">{ms_each}", ">exposed ms", ">rate")
        for c in p.copies:
            copies.add_row(
                c.kind,
                c.host_memory,
                str(c.count),
                figures(c.bytes / 1e6),
                figures(c.time_us / p.repeats / 1e3),
                figures(c.exposed_us / p.repeats / 1e3),
                si(c.bytes_per_s, "B/s"),
            )
        out.print(copies)
    if p.memory:
        memory = table(
            f"Memory at its peak: {figures(p.memory.peak / 2**20)} MiB on {p.memory.device}",
            ">MiB",
            ">blocks",
            "from",
            "phase",
            "where",
        )
        for top in p.memory.top[:8]:
            where = top["stack"][0] if top["stack"] else top["module"]
            memory.add_row(
                figures(top["bytes"] / 2**20), str(top["count"]), _short(top["operator"]), top["phase"], _short(where)
            )
        out.print(memory)
        for r in p.memory.remedies:
            out.print(f"{r.what}: up to {figures(r.saves / 2**20)} MiB less")
    print_notes(out, p)
    out.print("Do this first" if p.advice else "Nothing to do first: no rule expects a gain of 1 % or more")
    for number, a in enumerate(p.advice, 1):
        out.print(f"{number}. {a.title}: up to {figures(a.gain_ms)} ms {each}")
        for text in (f"{a.why[:1].upper()}{a.why[1:]}.", f"How: {a.how}.", f"Estimate: {a.rule}."):
            out.print(Padding(text, (0, 0, 0, 3)), style="dim" if text.startswith("Estimate") else "")


def print_notes(out: Console, p: Profile) -> None:
    if p.dropped:
        lost = "; ".join(f"{n} {why}" for why, n in p.dropped.items())
        out.print(f"Events left out of all this: {lost}", style="yellow")
    if p.device == "cuda" and not p.ceilings:
        out.print(
            f"No share of the limit: no ceilings of {p.gpu or 'this GPU'} are recorded (weft bench --save records them)",
            style="dim",
        )


def print_comparison(out: Console, found: Any) -> None:
    out.print(
        f"{found.before} → {found.after}: {figures(found.before_ms)} → {figures(found.after_ms)} ms {found.each}",
        soft_wrap=True,
    )
    rows = table("By operator, ms", "operator", "phase", ">before", ">after", ">change", "verdict")
    for c in found.changes[: 2 * MOST_ROWS]:
        rows.add_row(
            _short(c.operator), c.phase, figures(c.before_ms), figures(c.after_ms), _signed(c.change_ms), c.verdict
        )
    out.print(rows)
    idle = table("Idle GPU, ms", "cause", ">before", ">after", ">change")
    for cause, before, after in found.idle:
        idle.add_row(cause, figures(before), figures(after), _signed(after - before))
    if found.idle:
        out.print(idle)


def print_ncu(out: Console, kernels: Sequence[Any]) -> None:
    rows = table("Kernels", "kernel", ">calls", ">ms", ">share", ">DRAM", ">SM", ">rate", "limited by")
    for k in kernels[: 2 * MOST_ROWS]:
        rows.add_row(
            _short(k.name, 32),
            str(k.calls),
            figures(k.time_us / 1e3),
            percent(k.share),
            percent(k.memory_share),
            percent(k.compute_share),
            si(k.bytes_per_s, "B/s"),
            k.limited_by,
        )
    out.print(rows)


def _short(name: str, most: int = 22) -> str:
    name = name.replace("aten::", "").replace("autograd::engine::evaluate_function: ", "engine: ").strip()
    return name if len(name) <= most else name[: most - 1] + "…"


def _signed(ms: float) -> str:
    return ("+" if ms > 0 else "−" if ms < 0 else "") + figures(abs(ms))
