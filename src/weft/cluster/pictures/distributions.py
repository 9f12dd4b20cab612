"""Charts of how times are spread over jobs: cumulative distributions on a logarithmic axis."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker
from numpy.typing import NDArray

from weft.cluster import metrics
from weft.cluster.metrics import size_classes
from weft.cluster.pictures import time_axis
from weft.cluster.result import Result
from weft.drawing.chart import Chart, empty, hover
from weft.drawing.palette import LIGHT as INK
from weft.drawing.quantities import figures
from weft.words import count

# What tells lines apart: colour, dashes, marker and its symbol in the legend.
STYLES = (
    ("ours", "solid", "circle", "●"), ("second", "dashed", "square", "■"), ("muted", "dotted", "triangle", "▲"),
    ("warn", "dotdash", "diamond", "◆"), ("good", "dashdot", "inverted_triangle", "▼"), ("bad", "solid", "star", "★"),
)  # fmt: skip
QUANTITIES = {
    "jct": (
        "Job completion time",
        "From arrival to completion, which is what a user feels. The line of a class crosses 50\u00a0% at its median; the "
        "further right its upper end, the longer its unluckiest jobs took.",
    ),
    "wait": (
        "Wait",
        "From arrival to start. A line that begins high at the left edge belongs to a class most of whose jobs start at "
        "once; where large jobs lie far to the right of small ones, small ones pass them or fill the gaps they need.",
    ),
    "slowdown": (
        "Slowdown",
        "Completion time as a multiple of the time that the job runs: 1 is no wait at all. Short jobs suffer most from a "
        "queue, and slowdown shows it. Jobs below 10 s count as 10 s.",
    ),
}


def by_size(result: Result) -> list[Chart]:
    """Job completion time, wait and slowdown by size class; nothing where no job ran."""
    ran = result.counted
    if not ran.any():
        return []
    classes = size_classes(result.jobs.gpus[ran])
    charts = []
    for key, values in job_times(result).items():
        if key != "jct" and not result.waited.any():
            continue  # no job waited, and the page says so
        title, meaning = QUANTITIES[key]
        lines = {name: values[ran][mask] for name, mask in classes.items()}
        charts.append(cdf(f"{title} by size of job", lines, meaning, key == "slowdown"))
    return charts


def cdf(
    title: str,
    lines: Mapping[str, NDArray[np.float64]],
    meaning: str,
    times: bool = False,
    runs: Mapping[str, int] = MappingProxyType({}),
) -> Chart:
    """A line for each name, at most as many as there are styles; ``times``: a multiple rather than seconds; ``runs``: of a
    name whose values are of several runs, how many."""
    lines = dict(list(lines.items())[: len(STYLES)])
    every = np.concatenate(list(lines.values()))
    low, high = log_range(every)
    if times:
        low, high = 1.0, max(high, 10.0)
    axis = "multiple of its duration (×, log)" if times else "time (log)"
    plot = empty(260, (low, high), (0, 1.03), x_axis_type="log", x_axis_label=axis, y_axis_label="jobs (%)")
    log_ticks(plot, low, high, times)
    ticks = {0: "0", 0.25: "25", 0.5: "50", 0.75: "75", 1: "100"}
    plot.yaxis.ticker, plot.yaxis.major_label_overrides = FixedTicker(ticks=list(ticks)), ticks
    legend, inks, described = [], {}, []
    for (name, values), (ink, dash, marker, symbol) in zip(lines.items(), STYLES, strict=False):
        value, share = quantiles(values)
        x = np.maximum(value, low)
        plot.step(
            np.append(x[:1], x), np.append(0, share), mode="after", line_color=INK[ink], line_dash=dash, line_width=2
        )
        marked = np.unique(np.linspace(0, len(x) - 1, min(len(x), 9)).round().astype(int))
        plot.scatter(x[marked], share[marked], marker=marker, size=8, color=INK[ink])
        points = plot.scatter("x", "y", source=ColumnDataSource({"x": x, "y": share}), size=9, alpha=0)
        write = _times if times else time_axis.text
        tips = [{"jobs": name, "share": f"{s:.1%}", "at most": write(v)} for v, s in zip(value, share, strict=True)]
        hover(plot, points, tips, {"x": x, "y": share})
        number, of = round(len(values) / runs.get(name, 1)), runs.get(name, 1)
        label = f"{name} ({count(number, 'job')}" + (f", {of} runs)" if of > 1 else ")")
        legend.append((f"{symbol}─", label))
        inks[label] = ink
        described.append(f"{name}: half of {count(number, 'job')} at most {write(float(np.median(values)))}")
    return Chart(title, plot, f"Lines: {'; '.join(described)}.", meaning, legend, inks)


def log_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """The ends of a logarithmic axis over times of 0 or more; what is below the first is drawn at it."""
    positive = values[values > 0]
    if not len(positive):
        return 1.0, 10.0
    low = time_axis.log_start(float(positive.min()), float(positive.max()))
    return low, max(float(positive.max()) * 1.25, low * 10)


def log_ticks(plot: Any, low: float, high: float, times: bool = False) -> None:
    """Ticks that fit on a phone: at powers of ten, or for seconds also at minutes, hours and days."""
    if times:
        powers = range(round(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = {10.0**p: f"{10.0**p:g}×" for p in powers}
    else:
        ticks = time_ticks(low, high)
    plot.xaxis.ticker, plot.xaxis.major_label_overrides = FixedTicker(ticks=sorted(ticks)), ticks


def time_ticks(low: float, high: float) -> dict[float, str]:
    """Seconds → what a logarithmic axis of seconds says there."""
    people = {1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min", 3600.0: "1 h", 36000.0: "10 h"}
    people |= {86400.0: "1 d", 864000.0: "10 d", 8640000.0: "100 d"}
    small = {10.0**p: f"{10.0**p:g} s" for p in range(-9, 0)}
    ticks = {at: text for at, text in (small | people).items() if low <= at <= high}
    if math.log10(high / low) > 5.5:  # all would run into each other
        ticks = {at: text for at, text in ticks.items() if at not in (10.0, 600.0, 36000.0)}
    return ticks or {low: time_axis.text(low)}


def _times(value: float) -> str:
    return f"{figures(value)}×"


MOST_QUANTILES = 160


def job_times(result: Result) -> dict[str, NDArray[np.float64]]:
    """Job completion time and wait (seconds) and slowdown (times) of every job, [J]; NaN for one that never started or is of
    the warm-up."""
    found = metrics.times(result)
    names = {"jct": "jct", "wait": "queueing", "slowdown": "slowdown"}
    return {name: np.where(result.warm_up, np.nan, found[key]) for name, key in names.items()}


def quantiles(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Values and the share of all that are at most so large: each value, or evenly spread ones of many."""
    ordered = np.sort(values)
    rank = np.unique(np.linspace(1, len(ordered), min(len(ordered), MOST_QUANTILES)).round().astype(np.int64))
    return ordered[rank - 1], rank / max(len(ordered), 1)
