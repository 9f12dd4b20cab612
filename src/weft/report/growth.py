"""How the simulator's CPU time grows with jobs and with nodes, log-log beside linear growth: charts, and a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.drawing.palette import LIGHT as INK
from weft.drawing.quantities import SPACE, distinct, figures
from weft.report.simulator import Growth, Timed, growth, load_of

ALONG = ("jobs", "nodes")
# What tells orders apart: ink, Bokeh's and matplotlib's marker, and its symbols, filled and hollow. The largest cluster
# or trace of an order is drawn filled and solid, the next one hollow and dashed.
STYLES = (
    ("ours", "circle", "o", "●○"),
    ("second", "square", "s", "■□"),
    ("muted", "triangle", "^", "▲△"),
)
LEAST_DECADES = 3  # of seconds
DASHES = (("solid", "-", "─"), ("dashed", "--", "┄"))
MEANINGS = {
    "jobs": "Along the dotted line ten times the jobs take ten times as long. A slope of 1 is linear growth; above "
    "1, a job costs more the more jobs there are.",
    "nodes": "The same jobs on more and more nodes. A flat line means that the engine skips nodes that have not "
    "changed; the dotted line is the cost of visiting every node for every job.",
}


def charts(timed: Sequence[Timed]) -> list[Any]:
    """A chart of the growth with jobs and one with nodes, where there are enough sizes to see one."""
    return [_chart(along, found) for along in ALONG if (found := drawn(growth(timed, along)))]


def drawn(found: Sequence[Growth]) -> list[tuple[Growth, int, int]]:
    """The lines that have a style, each with its order's number and its own number among the order's lines."""
    orders = distinct(g.order for g in found)[: len(STYLES)]
    ranks: dict[str, int] = {}
    chosen = []
    for g in found:
        rank = ranks[g.order] = ranks.get(g.order, -1) + 1
        if g.order in orders and rank < len(DASHES):
            chosen.append((g, orders.index(g.order), rank))
    return chosen


def linear(g: Growth, low: float, high: float) -> tuple[list[float], list[float]]:
    """Linear growth through the middle of a line, from size ``low`` to ``high``."""
    middle = [math.exp(sum(map(math.log, column)) / len(column)) for column in zip(*g.points, strict=True)]
    return [low, high], [middle[1] / middle[0] * size for size in (low, high)]


def ranges(found: Sequence[tuple[Growth, int, int]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ends of both axes: sizes, and whole decades of seconds."""
    sizes, seconds = ([p[i] for g, _, _ in found for p in g.points] for i in (0, 1))
    bottom, top = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    spare = max(LEAST_DECADES - (top - bottom), 0)  # shared by both ends, so that what is flat looks flat
    return (min(sizes) / 1.5, max(sizes) * 1.5), (10.0 ** (bottom - spare // 2), 10.0 ** (top + spare - spare // 2))


def decades(low: float, high: float, short: bool = False) -> dict[float, str]:
    """Powers of ten in a range, written ``1,000``, or ``1 k`` where they must be short."""
    ticks = {}
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        value = 10.0**power
        if short and power >= 3:
            ticks[value] = f"{value / 1e6:g}{SPACE}M" if power >= 6 else f"{value / 1e3:g}{SPACE}k"
        else:
            ticks[value] = f"{value:,.0f}" if power >= 0 else f"{value:g}"
    return ticks


def _chart(along: str, found: Sequence[tuple[Growth, int, int]]) -> Any:
    from bokeh.models import ColumnDataSource, FixedTicker

    from weft.drawing.chart import Chart, empty, hover

    (left, right), (bottom, top) = ranges(found)
    plot = empty(
        300, (left, right), (bottom, top), x_axis_type="log", y_axis_type="log",
        x_axis_label=f"{along} (log)", y_axis_label="CPU seconds (log)",
    )  # fmt: skip
    for axis, ticks in ((plot.xaxis, decades(left, right, short=True)), (plot.yaxis, decades(bottom, top))):
        axis.ticker, axis.major_label_overrides = FixedTicker(ticks=list(ticks)), ticks
    plot.line(*linear(found[0][0], left, right), line_color=INK["ink"], line_dash="dotted", line_width=1.5)
    legend, inks = [], {}
    for g, order, rank in found:
        ink, marker, _, symbols = STYLES[order]
        dash, _, stroke = DASHES[rank]
        x, y = (list(column) for column in zip(*g.points, strict=True))
        plot.line(x, y, line_color=INK[ink], line_dash=dash, line_width=2)
        dots = plot.scatter(
            "x", "y", source=ColumnDataSource({"x": x, "y": y}), marker=marker, size=8,
            line_color=INK[ink], fill_color=INK["paper" if rank else ink],
        )  # fmt: skip
        tips = [{"of": g.name, along: f"{n:,}", "CPU seconds": figures(s)} for n, s in g.points]
        hover(plot, dots, tips, {"x": x, "y": y})
        label = f"{g.name}: slope {g.told}"
        legend.append((f"{symbols[rank]}{stroke}", label))
        inks[label] = ink
    told = "; ".join(
        f"{g.name} from {figures(g.points[0][1])} s at {g.points[0][0]:,} to {figures(g.points[-1][1])} s at "
        f"{g.points[-1][0]:,} {along}, slope {g.told}"
        for g, _, _ in found
    )
    return Chart(
        f"Time against {along}, at {load_of(found[0][0].load)} load",
        plot,
        f"Lines: {told}.",
        MEANINGS[along],
        [*legend, ("···", "linear growth")],
        inks,
    )


def picture(path: str | Path, timed: Sequence[Timed]) -> Path:
    """Writes both charts side by side as ``.png`` or ``.svg``. Folders on the way are made.

    Raises:
        ValueError: another suffix, or too few sizes to see a growth.
        ModuleNotFoundError: no matplotlib.
    """
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a picture '{path.name}'; expected a name that ends in .png or .svg")
    panels = [(along, found) for along in ALONG if (found := drawn(growth(timed, along)))]
    if not panels:
        raise ValueError(
            "no growth to draw; expected records of at least three sizes (python examples/simulator_speed.py --save)"
        )
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"a {path.suffix} needs matplotlib: pip install 'weft[pictures]'", name=missing.name
        ) from missing

    figure = Figure(figsize=(5.2 * len(panels), 3.9), layout="constrained", facecolor=INK["paper"])
    FigureCanvasAgg(figure)
    for axes, (along, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(axes, along, found)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "weft"}):  # and no date: the same records give the same file
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def _panel(axes: Any, along: str, found: Sequence[tuple[Growth, int, int]]) -> None:
    (left, right), (bottom, top) = ranges(found)
    axes.set(xscale="log", yscale="log", xlabel=along, ylabel="CPU seconds", facecolor=INK["paper"])
    axes.set_title(f"Time against {along}, at {load_of(found[0][0].load)} load", fontsize=10)
    axes.minorticks_off()
    for which, ticks in ((axes.xaxis, decades(left, right)), (axes.yaxis, decades(bottom, top))):
        which.set_ticks(list(ticks), list(ticks.values()))
    axes.grid(color=INK["rule"], linewidth=0.8)
    axes.set_axisbelow(True)
    for g, order, rank in found:
        ink, _, marker, _ = STYLES[order]
        axes.plot(
            *zip(*g.points, strict=True), DASHES[rank][1], marker=marker, color=INK[ink],
            label=f"{g.name}: slope {g.told}", markerfacecolor=INK["paper" if rank else ink],
        )  # fmt: skip
    axes.plot(*linear(found[0][0], left, right), ":", color=INK["ink"], label="linear growth")
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.legend(fontsize=8, loc="best", facecolor=INK["paper"], framealpha=0.9)
    for side in axes.spines.values():
        side.set_color(INK["rule"])
