"""The page's pen, Bokeh: an empty figure in the page's style, bars under headings, and what stands under the pointer.

Charts take hover alone as a tool: a page that is scrolled with a finger must not catch it.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.core.properties import value as literal
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.plotting import figure

from weft.drawing.palette import LIGHT as INK
from weft.drawing.quantities import NONE, distinct, figures, known, percent, ratio, spread
from weft.records import Measurement

ROW = 18  # height of a bar with its gap, in pixels
WIDTH = 40  # characters of a heading that fit across a phone
FONT = literal("system-ui, sans-serif")
HATCHES = {"torch": "right_diagonal_line", "torch.compile": "left_diagonal_line", "numpy": "horizontal_line"}
OTHER_HATCHES = ("cross", "vertical_line", "dot", "diagonal_cross", "horizontal_wave", "vertical_wave", "ring")


@dataclass
class Chart:
    """A figure with what makes it readable: a title, a text alternative, and what it means for someone learning."""

    title: str
    figure: Any
    description: str
    meaning: str
    legend: list[tuple[str, str]] = field(default_factory=list)  # (symbol, what it stands for)
    inks: dict[str, str] = field(default_factory=dict)  # what a symbol stands for → a name of the palette


@dataclass
class Bar:
    """One bar: ``text`` is its number, ``tip`` stands under the pointer, ``low`` and ``high`` end its whiskers."""

    name: str
    value: float
    text: str
    ours: bool
    tip: dict[str, str]
    low: float | None = None
    high: float | None = None


def empty(height: int, x: tuple[float, float], y: tuple[float, float], **options: Any) -> Any:
    """A figure over the ranges ``x`` and ``y``: as wide as its place, transparent, without a toolbar."""
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=Range1d(start=x[0], end=x[1]),
        y_range=Range1d(start=y[0], end=y[1]),
        toolbar_location=None,
        tools="",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=12,
        **options,
    )
    for axis in plot.axis:
        axis.axis_line_color = INK["rule"]
        axis.major_tick_line_color = INK["rule"]
        axis.minor_tick_line_color = None
        axis.major_label_text_color = INK["ink"]
        axis.major_label_text_font = axis.axis_label_text_font = FONT.value
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = INK["muted"]
    plot.grid.grid_line_color = INK["rule"]
    return plot


def write(plot: Any, color: str = "ink", **options: Any) -> None:
    """Small text inside a figure."""
    style = {"text_font": FONT, "text_font_size": "11px", "text_baseline": "middle", "text_color": INK[color]}
    plot.text(**(style | options))


def hover(plot: Any, glyphs: Any, tips: Sequence[dict[str, str]], columns: dict[str, Any]) -> None:
    """Puts a tip under the pointer for each row of ``columns``, which the glyphs' source is then made of."""
    keys = distinct(key for tip in tips for key in tip)
    columns |= {f"tip{i}": [tip.get(key, NONE) for tip in tips] for i, key in enumerate(keys)}
    glyphs.data_source.data = columns
    plot.add_tools(HoverTool(renderers=[glyphs], tooltips=[(key, f"@tip{i}") for i, key in enumerate(keys)]))


def tip_of(m: Measurement) -> dict[str, str]:
    """All numbers of a measurement."""
    around, ratio_around = spread(m.time_p20_us, m.time_p80_us, figures), spread(m.ratio_p20, m.ratio_p80, ratio)
    beside = f", {m.best_peer}" if m.best_peer else ""
    rows = {
        "implementation": m.implementation + (" (weft)" if m.ours else ""),
        "workload": f"{m.workload} {m.dtype}, {m.cache} cache, {m.device}",
        "time": f"{figures(m.time_us)} µs" + (f" ({around})" if around else ""),
        "limit": f"{figures(m.limit_us)} µs, {m.limit_name or 'ceiling'}" if known(m.limit_us) else NONE,
        "share of ceiling": percent(m.share_of_ceiling),
        "to best peer": ratio(m.ratio_to_best_peer) + (f" ({ratio_around})" if ratio_around else "") + beside,
        "host": f"{figures(m.host_us)} µs" if known(m.host_us) else NONE,
        "error": f"{percent(m.error)} of what is allowed" if known(m.error) else NONE,
    }
    return {key: text for key, text in rows.items() if text != NONE}


def bars(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    *,
    axis: str,
    end: float,
    ticks: dict[float, str],
    start: float = 0.0,
    base: float = 0.0,
    line: float | None = None,
    log: bool = False,
) -> Any:
    """Horizontal bars under headings, drawn from ``base``: ours plain, peers hatched, a dashed ``line`` through all.

    Each bar's name stands before it and its number after it; where there is a line that numbers would run into, they
    stand in a column of their own. Lying bars keep names horizontal, and a phone can show them.
    """
    rows: list[dict[str, Any]] = []
    headings: dict[str, list[Any]] = {"y": [], "text": []}
    blocks: list[tuple[float, float]] = []  # from the top of a group's bars to their bottom
    hatch_of = _hatches(bar.name for _, group in groups for bar in group if not bar.ours)
    y = 0.0
    for heading, group in groups:
        for part in textwrap.wrap(heading, WIDTH):
            y += 1
            headings["y"].append(y)
            headings["text"].append(part.replace(", ", ","))  # a space only to break at: a phone is narrow
        blocks.append((y + 0.5, y + len(group) + 0.5))
        for bar in group:
            y += 1
            rows.append(
                {
                    "y": y,
                    "from": min(base, bar.value),
                    "to": max(base, bar.value),
                    "fill": INK["ours" if bar.ours else "peer"],
                    "edge": INK["ours" if bar.ours else "hatch"],
                    "hatch": "blank" if bar.ours else hatch_of[bar.name],
                    "text": bar.text,
                    "text_at": bar.value if line is None else end,
                }
            )
        y += 0.25
    every = [bar for _, group in groups for bar in group]
    names = {row["y"]: textwrap.shorten(bar.name, 19, placeholder="…") for row, bar in zip(rows, every, strict=True)}

    height = round(ROW * (y + 0.5)) + 52
    plot = empty(height, (start, end), (y + 0.5, 0.2), x_axis_label=axis, x_axis_type="log" if log else "linear")
    drawn = plot.hbar(
        y="y",
        left="from",
        right="to",
        height=0.74,
        source=ColumnDataSource({key: [row[key] for row in rows] for key in rows[0]}),
        fill_color="fill",
        line_color="edge",
        line_width=0.8,
        hatch_pattern="hatch",
        hatch_color=INK["hatch"],
        hatch_scale=7,
        hatch_weight=0.8,
    )
    align: dict[str, Any] = {"text_align": "right", "x_offset": -2} if line is not None else {"x_offset": 6}
    write(plot, x="text_at", y="y", text="text", source=drawn.data_source, **align)
    if headings["y"]:
        write(plot, "muted", x=start, y="y", text="text", source=ColumnDataSource(headings), x_offset=3)
    whiskers = [(row["y"], bar) for row, bar in zip(rows, every, strict=True) if known(bar.low) and known(bar.high)]
    if whiskers:
        at, low, high = [y for y, _ in whiskers], [bar.low for _, bar in whiskers], [bar.high for _, bar in whiskers]
        plot.segment(x0=low, x1=high, y0=at, y1=at, line_color=INK["ink"], line_width=1.5)
        plot.scatter(low + high, at + at, marker="dash", angle=math.pi / 2, size=7, line_color=INK["ink"])
    if line is not None:
        tops, bottoms = zip(*blocks, strict=True)
        plot.segment(x0=line, x1=line, y0=tops, y1=bottoms, line_color=INK["ink"], line_dash="dashed", line_width=1.2)
    plot.xaxis.ticker = FixedTicker(ticks=list(ticks))
    plot.xaxis.major_label_overrides = ticks
    plot.yaxis.ticker = FixedTicker(ticks=list(names))
    plot.yaxis.major_label_overrides = names
    plot.yaxis.major_tick_line_color = None
    plot.ygrid.visible = False
    hover(plot, drawn, [bar.tip for bar in every], dict(drawn.data_source.data))
    return plot


def round_ticks(top: float) -> list[float]:
    """At most six round numbers from 0 to ``top``."""
    power = 10.0 ** math.floor(math.log10(top))
    step = next(s for s in (power / 5, power / 2, power, 2 * power, 5 * power) if top / s < 5.5)
    return [i * step for i in range(int(top / step) + 1)]


def _hatches(names: Iterable[str]) -> dict[str, str]:
    """Each peer's own hatch; PyTorch's are the same in every chart."""
    others = iter(OTHER_HATCHES * 9)
    return {name: HATCHES.get(name) or next(others) for name in distinct(names)}
