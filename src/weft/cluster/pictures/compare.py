"""Several results side by side: what each policy's users waited, with the range over seeds and ties."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource
from numpy.typing import NDArray

from weft.cluster.metrics import distribution
from weft.cluster.pictures import distributions, time_axis
from weft.cluster.policy import without_folders
from weft.cluster.result import Result
from weft.drawing.chart import Chart, empty, hover, write
from weft.drawing.palette import LIGHT as INK
from weft.words import count

# What tells statistics apart: marker and its symbol in the legend. Every row has all four.
MARKERS = {"mean": ("diamond", "◆"), "p50": ("circle", "●"), "p95": ("square", "■"), "p99": ("triangle", "▲")}
MEANINGS = {
    "jct": "Further left is sooner. The mean is what the whole cluster's users feel together, p99 what the unluckiest of a "
    "hundred does; a policy may win the one and lose the other. A bar through a mark spans the runs with other seeds or "
    "ties: policies whose bars overlap are not told apart by these runs.",
    "wait": "The part of the completion time that the policy decides. A mark at the left edge is a wait of 0 or nearly so.",
}


@dataclass(frozen=True)
class Policy:
    """Results that share an order and a placement: runs that differ in seed or in the rule for ties."""

    name: str
    runs: list[Result]

    def statistics(self, quantity: str) -> dict[str, list[float]]:
        """``mean``, ``p50``, ``p95`` and ``p99`` of a quantity of :func:`distributions.job_times`, of each run in which
        jobs ran."""
        values = (distributions.job_times(run)[quantity] for run in self.runs)
        found = [distribution(column[~np.isnan(column)]) for column in values]
        return {name: [d[name] for d in found if d[name] is not None] for name in MARKERS}  # type: ignore[misc]

    def pooled(self, quantity: str) -> NDArray[np.float64]:
        """The values of all runs together."""
        values = np.concatenate([distributions.job_times(run)[quantity] for run in self.runs])
        return values[~np.isnan(values)]


def policies(results: Sequence[Result]) -> list[Policy]:
    """In order of first appearance. Results on clusters or traces of other sizes are not thrown together."""

    def key(result: Result) -> tuple[Any, ...]:
        return result.order, result.placement, result.cluster.total_gpus, len(result.jobs)

    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    clusters, traces = ({k[column] for k in groups} for column in (2, 3))

    alike = len({tuple(map(without_folders, k[:2])) for k in groups}) < len({k[:2] for k in groups})

    def name(k: tuple[Any, ...]) -> str:
        more = [f"{k[2]:,} GPUs"] * (len(clusters) > 1) + [count(k[3], "job")] * (len(traces) > 1)
        return ", ".join((*(k[:2] if alike else map(without_folders, k[:2])), *more))

    return [Policy(name(k), runs) for k, runs in groups.items()]


def charts(found: Sequence[Policy]) -> list[Chart]:
    """Marks of both quantities and their distributions; nothing where no job ran."""
    made = []
    for quantity, title in (("jct", "Job completion time"), ("wait", "Wait")):
        made += _marks(found, quantity, title)
    lines = {policy.name: policy.pooled("jct") for policy in found}
    lines = {name: values for name, values in lines.items() if len(values)}
    if lines:
        drawn = min(len(lines), len(distributions.STYLES))
        more = f" The first {drawn} of {len(lines)} policies are drawn." if drawn < len(lines) else ""
        made.append(
            distributions.cdf(
                "Job completion time by policy",
                lines,
                "A policy whose line is left of another's at every height is better for every kind of user. Where lines "
                f"cross, it trades the time of some jobs for that of others.{more}",
                runs={policy.name: len(policy.runs) for policy in found},
            )
        )
    return made


def _marks(found: Sequence[Policy], quantity: str, title: str) -> list[Chart]:
    statistics = {policy.name: policy.statistics(quantity) for policy in found}
    statistics = {name: each for name, each in statistics.items() if each["mean"]}
    if not statistics:
        return []
    low, high = distributions.log_range(
        np.array([v for each in statistics.values() for column in each.values() for v in column])
    )
    plot = empty(
        72 + 46 * len(statistics), (low / 1.15, high), (len(statistics) - 0.4, -0.75),
        x_axis_type="log", x_axis_label="time (log)",
    )  # fmt: skip
    distributions.log_ticks(plot, low, high)
    plot.yaxis.visible = plot.ygrid.visible = False
    write(
        plot,
        x=low / 1.15,
        y=[row - 0.5 for row in range(len(statistics))],
        text=list(statistics),
        text_font_size="12px",
    )
    plot.segment(
        x0=low / 1.15, x1=high, y0=list(range(len(statistics))), y1=list(range(len(statistics))), line_color=INK["rule"]
    )
    runs = max(len(policy.runs) for policy in found)
    for name, (marker, _) in MARKERS.items():
        ink = INK["ours" if name == "mean" else "second"]
        values = [each[name] for each in statistics.values()]
        at = [max(math.fsum(column) / len(column), low) for column in values]
        rows = list(range(len(values)))
        ends = [[max(pick(column), low) for column in values] for pick in (min, max)]
        if runs > 1:
            plot.hbar(y=rows, left=ends[0], right=ends[1], height=0.28, fill_color=ink, fill_alpha=0.3, line_color=ink)
        marks = plot.scatter(
            "x",
            "y",
            source=ColumnDataSource({"x": [], "y": []}),
            marker=marker,
            color=ink,
            size=13 if name == "mean" else 9,
        )
        tips = [
            {
                "policy": policy,
                f"{name}": time_axis.text(math.fsum(column) / len(column)),
                "least to most": f"{time_axis.text(min(column))} to {time_axis.text(max(column))} "
                f"in {count(len(column), 'run')}",
            }
            for policy, column in zip(statistics, values, strict=True)
        ]
        hover(plot, marks, tips, {"x": at, "y": rows})
    described = "; ".join(
        f"{name} mean {time_axis.text(float(np.mean(each['mean'])))}" for name, each in statistics.items()
    )
    legend = [(symbol, name) for name, (_, symbol) in MARKERS.items()]
    legend += [("▭", "least to most of the runs")] * (runs > 1)
    inks = {name: "ours" if name == "mean" else "second" for name in MARKERS}
    return [Chart(f"{title} by policy", plot, f"Marks: {described}.", MEANINGS[quantity], legend, inks)]
