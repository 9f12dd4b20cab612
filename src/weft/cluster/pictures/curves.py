"""Charts over time: GPUs allocated, the queue, fragmentation."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import HoverTool, NumeralTickFormatter

from weft.cluster.allocations import without_nodes
from weft.cluster.pictures import time_axis
from weft.cluster.pictures.series import OverTime, Series
from weft.cluster.result import Result
from weft.drawing.chart import Chart, empty
from weft.drawing.palette import LIGHT as INK
from weft.drawing.quantities import figures, percent

HEIGHT = 230
AXIS = "time since the first job arrived"


@dataclass(frozen=True)
class Curve:
    """A line over time; ``hatch`` fills the area under it, ``dash`` tells it from a second line."""

    name: str
    series: Series
    ink: str = "ours"
    dash: str = "solid"
    hatch: str | None = None


def utilisation(result: Result, found: OverTime) -> Chart:
    gpus, mean = result.cluster.total_gpus, found.allocated.overall
    share = percent(mean / gpus) if gpus else "none"
    return Chart(
        "GPUs allocated",
        _plot([Curve("allocated", found.allocated, hatch="blank")], "GPUs", gpus),
        f"Line: {share} of {gpus:,} GPUs on average, {figures(found.allocated.most.max())} at most.",
        "Below the dashed line, which is all GPUs of the cluster, are idle GPUs. While jobs wait, a gap there is "
        "work that a better policy could have done; after the last arrivals it only says that the trace ends.",
        [("━", "allocated"), ("╌", "all GPUs")],
        {"allocated": "ours"},
    )


def queue(found: OverTime) -> Chart | None:
    """None where no job waited."""
    if not found.waiting_jobs.most.any():
        return None
    return Chart(
        "Jobs waiting",
        _plot([Curve("jobs waiting", found.waiting_jobs, "second")], "jobs"),
        f"Line: {figures(found.waiting_jobs.overall)} on average, {figures(found.waiting_jobs.most.max())} at most.",
        "A queue that comes back to 0 has caught up with its users. One that only grows gets more work than the cluster "
        "can do, whatever the policy.",
    )


def waiting_gpus(result: Result, found: OverTime) -> Chart | None:
    """None where no job waited for a GPU."""
    most, gpus = found.waiting_gpus.most.max(), result.cluster.total_gpus
    if not most:
        return None
    clusters = f", {figures(most / gpus)} times the cluster" if gpus else ""
    return Chart(
        "GPUs that waiting jobs request",
        _plot([Curve("GPUs requested", found.waiting_gpus, "second", hatch="right_diagonal_line")], "GPUs"),
        f"Line: {figures(found.waiting_gpus.overall)} on average, {figures(most)} at most{clusters}.",
        "The queue weighted by what its jobs request. Where few jobs wait for many GPUs, large jobs are stuck; where it is "
        "about "
        "one GPU a job, small ones are.",
    )


def fragmentation(result: Result, found: OverTime) -> Chart | None:
    """None where GPUs were only counted: they were then on no node."""
    if without_nodes(result):
        return None
    stranded, allocated, gpus = found.stranded, found.allocated, result.cluster.total_gpus
    free = Series(allocated.edge, gpus - allocated.mean, gpus - allocated.mean)
    share = percent(stranded.overall / free.overall) if free.overall else "none"
    curves = [
        Curve("free", free, "muted", "dashed"),
        Curve("free on partly used nodes", stranded, "warn", hatch="left_diagonal_line"),
    ]
    return Chart(
        "Fragmentation: free GPUs on partly used nodes",
        _plot(curves, "GPUs"),
        f"Lines: {figures(stranded.overall)} GPUs on average are free on nodes of which others are used, {share} of all free.",
        "Hatched GPUs are free, but share their node with a job: a job that needs a whole node cannot have them. The nearer "
        "they come to the dashed line, all free GPUs, the more of what is free is such pieces.",
        [("╌", "free"), ("▧", "free on partly used nodes")],
        {"free on partly used nodes": "warn"},
    )


def _plot(curves: list[Curve], axis: str, capacity: float | None = None) -> Any:
    begin, end = (float(curves[0].series.edge[i]) for i in (0, -1))
    name, length = time_axis.unit(end - begin)
    top = max(1.0, capacity or 0.0, *(float(curve.series.most.max()) for curve in curves))
    plot = empty(
        HEIGHT, (0, (end - begin) / length), (0, 1.06 * top), x_axis_label=f"{AXIS} ({name})", y_axis_label=axis
    )
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[0]")
    plot.yaxis.ticker.desired_num_ticks = 5
    plot.xgrid.visible = False
    for curve in curves:
        series, ink = curve.series, INK[curve.ink]
        x = ((series.edge - begin) / length).astype(np.float32)
        mean, most = (np.append(column, column[-1:]).astype(np.float32) for column in (series.mean, series.most))
        if curve.hatch:
            plot.varea_step(
                x, np.zeros_like(mean), mean, step_mode="after", fill_color=ink, fill_alpha=0.25,
                hatch_pattern=curve.hatch, hatch_color=ink, hatch_alpha=0.6, hatch_scale=8, hatch_weight=0.8,
            )  # fmt: skip
        if series.mean is not series.most:
            plot.varea_step(x, mean, most, step_mode="after", fill_color=ink, fill_alpha=0.25)
        plot.step(x, mean, mode="after", line_color=ink, line_width=1.5, line_dash=curve.dash)
        points = plot.line("x", "mean", source={"x": x, "mean": mean, "most": most}, line_alpha=0)
        tips = [("time", f"@x{{0,0.00}} {name}"), (curve.name, "@mean{0,0.[0]}")]
        tips += [("at most", "@most{0,0}")] * (series.mean is not series.most)
        plot.add_tools(HoverTool(renderers=[points], tooltips=tips, mode="vline", line_policy="prev"))
    if capacity:
        plot.line(
            [0, (end - begin) / length], [capacity] * 2, line_color=INK["ink"], line_dash="dashed", line_width=1.2
        )
    return plot
