"""The page's section on scheduling a cluster: the same jobs under several policies, and the simulator's speed."""

from collections.abc import Mapping, Sequence
from typing import Any

from weft.drawing.embedding import embed, embed_all
from weft.drawing.palette import LIGHT as INK
from weft.drawing.palette import WAITS
from weft.drawing.quantities import figures
from weft.report import growth, simulator

HOUR = 3600.0
LEAST_SHARE = 0.005  # of a policy's wait; reasons with less are left out
OTHER = ("peer", "horizontal_wave", "▢")  # the style of a reason without one in the palette


def section(scheduling: Mapping[str, Any], cpu: str) -> dict[str, Any]:
    """What the template shows of ``Contents.scheduling``; nothing where that is empty.

    Args:
        scheduling: ``records``: lines of ``simulate.jsonl``; ``comparison``: ``cluster``, ``load``, ``seed`` and
            ``runs``, each an object of ``weft simulate --json``; or ``lacking`` (what to install), or ``failed`` (why
            there is none).
        cpu: this machine's; where it has no records those of the machine that was measured last are shown.
    """
    if not scheduling:
        return {}
    timed = simulator.of_one_machine(simulator.read(scheduling.get("records") or []), cpu)
    size, loads, rows = simulator.speed(timed)
    comparison = scheduling.get("comparison") or {}
    runs = [run for run in comparison.get("runs") or [] if run.get("completed")]
    return {
        "size": size,
        "loads": [simulator.load_of(load) for load in loads],
        "rows": rows,
        "measured": " · ".join(simulator.about(timed)) if timed else "",
        "elsewhere": bool(timed) and timed[0].machine != cpu,
        "growth": embed_all(*growth.charts(timed)) if timed else [],
        "comparison": comparison | {"load": simulator.load_of(comparison.get("load") or 0)},
        "runs": [_row(run) for run in runs],
        "cpu_s": sum(float(run.get("cpu_s") or 0) for run in runs),
        "waits": embed(_waits(runs)),
        "jct": embed(_jct(runs)),
        "lacking": scheduling.get("lacking") or "",
        "failed": scheduling.get("failed") or "",
    }


def _row(run: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's numbers in hours, and what its jobs waited for, most first."""
    waited = {name: s for name, s in run["wait_reasons"].items() if s}
    total = sum(waited.values())
    shares = sorted(((s / total, name) for name, s in waited.items()), reverse=True)
    return {
        "order": run["order"],
        "numbers": [run[of][which] / HOUR for of in ("jct", "queueing") for which in ("mean", "p99")],
        "stops": run["preemptions"],
        "waited": ", ".join(f"{name} {100 * share:.0f}\u202f%" for share, name in shares if share >= LEAST_SHARE),
    }


def _jct(runs: Sequence[Mapping[str, Any]]) -> Any:
    """Mean and p99 of every policy's completion times."""
    from bokeh.models import ColumnDataSource, FixedTicker

    from weft.drawing.chart import Chart, hover, write

    if not runs:
        return None
    values = {which: [run["jct"][which] / HOUR for run in runs] for which in ("mean", "p99")}
    low, high = min(values["mean"]) / 1.6, max(values["p99"]) * 1.6
    plot = _rows(runs, (low, high), x_axis_type="log", x_axis_label="job completion time (hours, log)")
    ticks = {tick: f"{tick:g}" for tick in (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000) if low <= tick <= high}
    plot.xaxis.ticker, plot.xaxis.major_label_overrides = FixedTicker(ticks=list(ticks)), ticks
    rows = list(range(len(runs)))
    plot.segment(x0=values["mean"], x1=values["p99"], y0=rows, y1=rows, line_color=INK["hatch"], line_width=1.5)
    for which, marker, ink in (("mean", "diamond", "ours"), ("p99", "triangle", "second")):
        dots = plot.scatter(
            "x", "y", source=ColumnDataSource({"x": [], "y": []}), marker=marker, color=INK[ink], size=12
        )
        tips = [{"policy": run["order"], which: f"{figures(h)} h"} for run, h in zip(runs, values[which], strict=True)]
        hover(plot, dots, tips, {"x": values[which], "y": rows})
        write(
            plot, x=values[which], y=rows, text=[figures(h) for h in values[which]], y_offset=-14, text_align="center"
        )
    best = min(runs, key=lambda run: run["jct"]["mean"])
    told = (
        f"{r['order']} mean {figures(r['jct']['mean'] / HOUR)} h, p99 {figures(r['jct']['p99'] / HOUR)} h" for r in runs
    )
    return Chart(
        "From arrival to completion",
        plot,
        f"Marks: {'; '.join(told)}.",
        "p99: one job in a hundred takes longer. Further left is sooner; the lowest mean here has "
        + f"{best['order']}.",
        [("◆", "mean"), ("▲", "p99")],
        {"mean": "ours", "p99": "second"},
    )


def _waits(runs: Sequence[Mapping[str, Any]]) -> Any:
    """The mean wait of each policy, split by what jobs waited for."""
    from bokeh.models import ColumnDataSource

    from weft.drawing.chart import Chart, hover, write

    means = [sum(run["wait_reasons"].values()) / run["jobs"] / HOUR for run in runs]
    if not any(means):
        return None
    plot = _rows(runs, (0, 1.3 * max(means)), x_axis_label="mean wait of a job (hours)")
    reasons = [name for name in runs[0]["wait_reasons"] if any(run["wait_reasons"][name] for run in runs)]
    left = [0.0] * len(runs)
    for name in reasons:
        ink, hatch, _ = WAITS.get(name, OTHER)
        hours = [run["wait_reasons"][name] / run["jobs"] / HOUR for run in runs]
        right = [a + b for a, b in zip(left, hours, strict=True)]
        bars = plot.hbar(
            y="y", left="from", right="to", height=0.45, source=ColumnDataSource({"y": [], "from": [], "to": []}),
            fill_color=INK[ink], fill_alpha=0.6, line_color=INK["ink"], line_width=0.5,
            hatch_pattern=hatch, hatch_color=INK["ink"], hatch_alpha=0.6, hatch_scale=8, hatch_weight=0.8,
        )  # fmt: skip
        tips = [
            {"policy": run["order"], "waited for": name, "mean": f"{figures(h)} h", "of": f"{figures(m)} h"}
            for run, h, m in zip(runs, hours, means, strict=True)
        ]
        hover(plot, bars, tips, {"y": list(range(len(runs))), "from": left, "to": right})
        left = right
    write(plot, x=means, y=list(range(len(runs))), text=[f"{figures(mean)} h" for mean in means], x_offset=6)
    return Chart(
        "What jobs waited for",
        plot,
        "Stacked bars: " + "; ".join(f"{run['order']} {_row(run)['waited'] or 'no wait'}" for run in runs) + ".",
        "The length is a job's mean wait. “Priority”: the job fitted, but jobs ahead of it in the queue did not start; "
        "skipping them or backfilling ends this. “Capacity”: too few GPUs were free; a policy only decides which jobs "
        "wait, and the mean is lowest when a few long jobs wait instead of many short ones.",
        [(WAITS.get(name, OTHER)[2], name) for name in reasons],
        {name: WAITS.get(name, OTHER)[0] for name in reasons},
    )


def _rows(runs: Sequence[Mapping[str, Any]], x: tuple[float, float], **options: Any) -> Any:
    """A figure with a row for each policy."""
    from bokeh.models import FixedTicker

    from weft.drawing.chart import empty

    plot = empty(70 + 44 * len(runs), x, (len(runs) - 0.4, -0.7), **options)
    plot.yaxis.ticker = FixedTicker(ticks=list(range(len(runs))))
    plot.yaxis.major_label_overrides = {row: run["order"] for row, run in enumerate(runs)}
    plot.ygrid.visible = False
    plot.yaxis.major_tick_line_color = None
    return plot
