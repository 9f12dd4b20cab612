"""Charts of what jobs waited for: shares by size class, and over time of arrival."""

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, NumeralTickFormatter

from weft.cluster.metrics import size_classes
from weft.cluster.pictures import time_axis
from weft.cluster.pictures.time_axis import span
from weft.cluster.result import REASONS, Result
from weft.drawing.chart import Chart, empty, hover, write
from weft.drawing.palette import LIGHT as INK
from weft.drawing.palette import WAITS as STYLES
from weft.drawing.quantities import percent

# What tells reasons apart: colour, hatch, and its symbol in the legend.
BINS = 60
NOT_WAITED = "No job waited: every job started when it arrived."


def charts(result: Result) -> list[Chart]:
    """Empty where no job waited."""
    total = result.waited[result.counted].sum(axis=0)
    seen = [i for i in range(len(REASONS)) if total[i] > 0]
    return [_by_size(result, seen), _over_time(result, seen)] if seen else []


def _by_size(result: Result, seen: list[int]) -> Chart:
    names, ran = list(REASONS), result.counted
    classes = size_classes(result.jobs.gpus[ran])
    plot = empty(
        64 + 44 * len(classes), (0, 1), (len(classes) - 0.4, -0.6), x_axis_label="share of the wait of its jobs (%)"
    )
    waited = {name: result.waited[ran][mask].sum(axis=0) for name, mask in classes.items()}
    for i in seen:
        ink, hatch, _ = STYLES[names[i]]
        rows = [row for row, name in enumerate(waited) if waited[name][i] > 0]
        each = [list(waited.values())[row] for row in rows]
        left = [float(column[:i].sum() / column.sum()) for column in each]
        right = [float(column[: i + 1].sum() / column.sum()) for column in each]
        bars = plot.hbar(
            y="y", left="left", right="right", height=0.42, source=ColumnDataSource({"y": [], "left": [], "right": []}),
            fill_color=INK[ink], fill_alpha=0.45, line_color=INK["ink"], line_width=0.8,
            hatch_pattern=hatch, hatch_color=INK["ink"], hatch_alpha=0.6, hatch_scale=8, hatch_weight=0.8,
        )  # fmt: skip
        tips = [
            {
                "jobs": list(waited)[row],
                "waited for": names[i],
                "that is": REASONS[names[i]],
                "altogether": time_axis.text(float(column[i])),
                "share": percent(float(column[i] / column.sum())),
            }
            for row, column in zip(rows, each, strict=True)
        ]
        hover(plot, bars, tips, {"y": rows, "left": left, "right": right})
    counts = {name: int(mask.sum()) for name, mask in classes.items()}
    text = [f"{n}: {time_axis.text(float(waited[n].sum()) / counts[n])} a job on average" for n in classes]
    write(plot, x=0, y=[row - 0.44 for row in range(len(text))], text=text, text_font_size="12px")
    plot.yaxis.visible = plot.ygrid.visible = False
    ticks = {0: "0", 0.25: "25", 0.5: "50", 0.75: "75", 1: "100"}
    plot.xaxis.ticker, plot.xaxis.major_label_overrides = FixedTicker(ticks=list(ticks)), ticks
    legend, inks = _legend(seen)
    described = "; ".join(
        f"{name} " + ", ".join(f"{names[i]} {percent(float(w[i] / w.sum()))}" for i in seen if w[i] > 0)
        for name, w in waited.items()
        if w.sum()
    )
    return Chart(
        "What jobs waited for, by size",
        plot,
        f"Bars: {described}.",
        "Only more GPUs shorten a wait for capacity. A wait for gang or fragmentation is one that another placement could "
        "shorten, and a wait for priority is the order's own choice: the job would have fitted.",
        legend,
        inks,
    )


def _over_time(result: Result, seen: list[int]) -> Chart:
    names, (begin, _) = list(REASONS), span(result)
    ran = result.counted
    submit = result.jobs.submit[ran]
    end = max(float(submit.max()), begin + 1e-9)
    unit, length = time_axis.unit(end - begin)
    bin_of = np.minimum(((submit - begin) / (end - begin) * BINS).astype(np.int64), BINS - 1)
    of_bin = np.stack(
        [np.bincount(bin_of, weights=result.waited[ran, i], minlength=BINS) for i in range(len(names))], axis=1
    )
    mean = of_bin / np.maximum(np.bincount(bin_of, minlength=BINS), 1)[:, None]  # [BINS, 7]
    edge = np.linspace(0, (end - begin) / length, BINS + 1)
    top = float(mean.sum(axis=1).max())
    wait_unit, wait_length = time_axis.unit(top)
    plot = empty(
        260, (0, edge[-1]), (0, 1.05 * top / wait_length),
        x_axis_label=f"arrival, since the first ({unit})", y_axis_label=f"mean wait ({wait_unit})",
    )  # fmt: skip
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    plot.xgrid.visible = False
    for i in seen:
        ink, hatch, _ = STYLES[names[i]]
        bottom, height = mean[:, :i].sum(axis=1) / wait_length, mean[:, i] / wait_length
        rows = np.flatnonzero(height > 0)
        bars = plot.quad(
            left="left", right="right", bottom="bottom", top="top",
            source=ColumnDataSource({"left": [], "right": [], "bottom": [], "top": []}),
            fill_color=INK[ink], fill_alpha=0.45, line_color=INK["ink"], line_width=0.3,
            hatch_pattern=hatch, hatch_color=INK["ink"], hatch_alpha=0.6, hatch_scale=8, hatch_weight=0.8,
        )  # fmt: skip
        tips = [
            {
                "arrived": f"{edge[r]:.4g} to {edge[r + 1]:.4g} {unit}",
                "waited for": names[i],
                "mean": time_axis.text(float(mean[r, i])),
                "of": time_axis.text(float(mean[r].sum())),
            }
            for r in rows
        ]
        columns = {"left": edge[rows], "right": edge[rows + 1], "bottom": bottom[rows], "top": (bottom + height)[rows]}
        hover(plot, bars, tips, columns)
    legend, inks = _legend(seen)
    peak = int(np.argmax(mean.sum(axis=1)))
    return Chart(
        "What jobs waited for, by arrival",
        plot,
        f"Stacked bars of {BINS} stretches of time: the longest mean wait is {time_axis.text(top)}, of jobs that arrived "
        f"{edge[peak]:.3g} to {edge[peak + 1]:.3g} {unit} after the first.",
        "Each bar is the mean wait of the jobs that arrived then, divided by what they waited for. A reason that grows with "
        "the queue is a matter of load; one that stays is a matter of shape.",
        legend,
        inks,
    )


def _legend(seen: list[int]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    names = [list(REASONS)[i] for i in seen]
    return [(STYLES[name][2], name) for name in names], {name: STYLES[name][0] for name in names}
