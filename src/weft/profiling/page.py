"""A profile as one HTML page that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.drawing.quantities import figures, percent, si
from weft.profiling.comparison import Comparison
from weft.profiling.tables import Profile
from weft.words import count

HERE = Path(__file__).parent
BARS = 16  # operators drawn
ROWS = 40  # operators listed


def page(profiles: Sequence[Profile]) -> str:
    """HTML of the slowest profile, with a line for each where there are several (the ranks of a job)."""
    from weft.drawing.embedding import embed_all, template

    p = max(profiles, key=lambda each: each.window_us / each.repeats)
    return str(
        template(HERE).render(
            title=p.source,
            about=_about(p),
            tiles=_tiles(p),
            p=p,
            rows=p.rows[:ROWS],
            more=p.rows[ROWS:],
            each="a step" if p.steps else "in all",
            ranks=profiles if len(profiles) > 1 else [],
            operators=embed_all(*_operators(p)),
            idle=embed_all(*_idle(p)),
            memory=embed_all(*_memory(p)),
            comparison=None,
        )
    )


def comparison(found: Comparison) -> str:
    """HTML of two profiles side by side."""
    from weft.drawing.embedding import template

    title = f"{found.before} → {found.after}"
    return str(
        template(HERE).render(title=title, about=[f"milliseconds {found.each}"], tiles=[], p=None, comparison=found)
    )


def _about(p: Profile) -> list[str]:
    return [
        p.gpu or ("GPU" if p.device == "cuda" else "CPU"),
        count(len(p.steps), "step"),
        *([f"rank {p.rank}"] if p.rank is not None else []),
        f"ceilings: {p.ceilings}" if p.ceilings else "no recorded ceilings of this device",
    ]


def _tiles(p: Profile) -> list[dict[str, str]]:
    idle = 1 - p.busy_us / p.window_us
    where = "the GPU" if p.device == "cuda" else "operators"
    tiles = [
        {
            "name": "Time",
            "number": f"{figures(p.window_us / p.repeats / 1e3)} ms",
            "text": "a step" if p.steps else "in all",
            "tone": "",
        },
        {
            "name": f"Without {where}",
            "number": percent(idle),
            "text": f"of the time nothing ran on {where}" if p.device == "cuda" else "of the time no operator ran",
            "tone": "bad" if idle > 0.2 else "good",
        },
        {
            "name": "Largest gain",
            "number": f"{figures(p.advice[0].gain_ms)} ms" if p.advice else "none",
            "text": p.advice[0].title.lower() if p.advice else "no rule expects 1 % or more",
            "tone": "",
        },
    ]
    if p.memory:
        tiles.append(
            {
                "name": "Peak memory",
                "number": f"{figures(p.memory.peak / 2**20)} MiB",
                "text": f"allocated on {p.memory.device}",
                "tone": "",
            }
        )
    return tiles


def _operators(p: Profile) -> list[Any]:
    from weft.drawing.chart import Bar, Chart, bars, round_ticks

    shown = [r for r in p.rows[:BARS] if r.time_us > 0]
    if not shown:
        return []
    made = []
    for row in shown:
        ms = row.time_us / p.repeats / 1e3
        tip = {
            "operator": f"{row.operator} {row.phase}",
            "module": row.module or "–",
            "kernels": ", ".join(row.kernels)[:120] or "–",
            "calls": str(row.calls),
            "time": f"{figures(ms)} ms",
            "rate": si(row.flops_per_s, "FLOP/s") if row.flops_per_s else si(row.bytes_per_s, "B/s"),
            "share of ceiling": percent(row.share_of_ceiling),
        }
        name = f"{_name(row.operator, 10)} backward" if row.phase == "backward" else _name(row.operator)
        made.append(Bar(name, ms, percent(row.share), True, tip))
    top = made[0].value
    figure = bars([("", made)], axis="ms", end=top * 1.18, ticks={t: figures(t) for t in round_ticks(top)})
    first = shown[0]
    return [
        Chart(
            "Time by operator",
            figure,
            f"{first.operator} takes the most, {percent(first.share)}",
            "Start at the top: what is long and far from its limit has something to gain. The table has the shares.",
        )
    ]


def _name(operator: str, most: int = 18) -> str:
    name = operator.rpartition("::")[2] or operator
    return name if len(name) <= most else name[: most - 1] + "…"


def _idle(p: Profile) -> list[Any]:
    from weft.drawing.chart import Bar, Chart, bars, round_ticks

    made = []
    for i in p.idle:
        ms = i.time_us / p.repeats / 1e3
        tip = {
            "cause": i.cause,
            "time": f"{figures(ms)} ms",
            "gaps": str(i.gaps),
            "mostly at": ", ".join(n for n, _ in i.what),
        }
        made.append(Bar(i.cause, ms, f"{figures(ms)} ms", True, tip))
    if not made or made[0].value <= 0:
        return []
    top = made[0].value
    figure = bars([("", made)], axis="ms", end=top * 1.25, ticks={t: figures(t) for t in round_ticks(top)})
    return [
        Chart(
            "Why the GPU was idle",
            figure,
            f"mostly {p.idle[0].cause}",
            "Launch: the host launches slower than the GPU runs. Host: it launched nothing at all. Queued: the GPU itself took "
            "so long, usually a microsecond or two.",
        )
    ]


def _memory(p: Profile) -> list[Any]:
    from weft.drawing.chart import Chart, empty, round_ticks
    from weft.drawing.palette import LIGHT

    if p.memory is None or len(p.memory.timeline) < 2 or p.memory.peak <= 0:
        return []
    start = p.memory.timeline[0][0]
    x = [(t - start) / 1e6 for t, _ in p.memory.timeline]
    y = [b / 2**20 for _, b in p.memory.timeline]
    plot = empty(240, (0, max(x[-1], 1e-6)), (0, max(y) * 1.08), x_axis_label="ms", y_axis_label="MiB")
    plot.varea_step(x=x, y1=[0] * len(x), y2=y, step_mode="after", fill_color=LIGHT["ours"], fill_alpha=0.15)
    plot.step(x=x, y=y, mode="after", line_color=LIGHT["ours"], line_width=1.5)
    plot.yaxis.ticker = round_ticks(max(y))
    return [
        Chart(
            f"Memory on {p.memory.device}",
            plot,
            f"the peak is {figures(p.memory.peak / 2**20)} MiB",
            "A hill in each step is what forward saves for backward; a floor that rises from step to step is a leak.",
        )
    ]
