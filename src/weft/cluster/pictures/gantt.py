"""Which job sat where: exact bars by node and GPU of a window that the reader moves, and a map of the whole to move it on.

A page carries the bars as compressed columns and draws those of the window alone, so that it opens at once with 100,000 jobs.
"""

import base64
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    PrintfTickFormatter,
)
from bokeh.models.annotations import BoxAnnotation, ColorBar
from bokeh.transform import factor_cmap, factor_hatch
from numpy.typing import NDArray

from weft.cluster.allocations import Allocations, without_nodes
from weft.cluster.metrics import CLASSES
from weft.cluster.model import WHOLE
from weft.cluster.pictures import time_axis
from weft.cluster.pictures.curves import AXIS
from weft.cluster.pictures.heat_map import Heat, heat
from weft.cluster.pictures.lanes import lanes
from weft.cluster.pictures.time_axis import span
from weft.cluster.pictures.window import READABLE_BARS, READABLE_GPUS, blocks, bounded, describe, first_window
from weft.cluster.result import Result
from weft.drawing import palette
from weft.drawing.chart import FONT, Chart, empty
from weft.drawing.palette import LIGHT as INK
from weft.words import count

MOST_EMBEDDED = 160_000  # pieces of a page: about 3 MB
MOST_DRAWN = 4_000  # bars at a time
MAPPED_ABOVE = 3_000  # pieces of a result: with more there is also the map
MOST_GPUS = 512  # rows of the widest window; below a pixel each there is nothing to see
STYLES = {  # of a size class: fill, hatch, symbol in the legend
    "1 GPU": ("hatch", "blank", "■"),
    "2–8 GPUs": ("second", "right_diagonal_line", "▨"),
    "more than 8": ("ours", "left_diagonal_line", "▧"),
}
STEPS = 24  # colours of the map


@dataclass
class Gantt:
    """The chart of bars, the map where there is one, and what the page's script needs to fill the bars.

    Args:
        data: name → numbers or text, compressed (:func:`packed`).
        facts: what of the result is embedded, and the first window.
        embedded: in words, which bars the page holds, where it does not hold all.
    """

    bars: Chart
    map: Chart | None
    data: dict[str, dict[str, str]]
    facts: dict[str, Any]
    embedded: str


def gantt(result: Result, pieces: Allocations, most: int = MOST_EMBEDDED) -> Gantt | None:
    """None where no job held a GPU."""
    if not len(pieces):
        return None
    begin, end = span(result)
    nodes = len(result.cluster)
    kept = bounded(pieces, nodes, most)
    runs = lanes(pieces, result.cluster.gpus)
    embedded = np.zeros(len(pieces), bool)
    embedded[kept.rows] = True
    rows = np.flatnonzero(embedded[runs.piece])
    rows = rows[np.argsort(pieces.start[runs.piece[rows]], kind="stable")]
    piece, first, height = runs.piece[rows], runs.first[rows], runs.count[rows]
    offset = np.concatenate(([0], np.cumsum(result.cluster.gpus)))
    divided = blocks(result.cluster)
    stretches, row = np.unique(pieces.stretch[piece], return_inverse=True)
    trace, held = result.jobs, result.stretches
    jobs, since = held.job[stretches], _waits_since(result)[stretches]
    lane = offset[pieces.node[piece]] * runs.unit + first
    (block, shown), start, stop = first_window(divided, lane / runs.unit, pieces.start[piece], begin, end)
    name, length = time_axis.unit(end - begin)
    data = {
        "job": packed(row, "Uint32"),
        "lane": packed(lane, "Uint32"),
        "count": packed(height, "Uint32"),
        "start": packed(held.begin[stretches] - begin, "Float32"),
        "since": packed(since - begin, "Float32"),
        "submit": packed(trace.submit[jobs] - begin, "Float32"),
        "duration": packed((held.end - held.begin)[stretches], "Float32"),
        "gpus": packed(trace.gpus[jobs], "Uint32"),
        "milli": packed(trace.milli[jobs], "Uint32"),
        "tenant": packed(trace.tenant[jobs], "Uint32"),
        "offset": packed(divided.offset, "Uint32"),
        "node": packed(divided.node, "Uint32"),
        "base": packed(divided.base, "Uint32"),
        "ids": packed("\n".join(_line(trace.id[int(j)]) for j in jobs)),
        "nodes": packed("\n".join(map(_line, result.cluster.names))),
    }
    facts = {
        "axis": AXIS,
        "length": length,  # of the map's unit, in seconds
        "unit": runs.unit,  # parts of a GPU that lanes and counts are in
        "span": end - begin,
        "tenants": [_line(tenant) for tenant in trace.tenants],
        "sizes": [[label, high] for label, (_, high) in CLASSES.items()],
        "most": MOST_DRAWN,
        "most_gpus": MOST_GPUS,
        "windowed": len(rows) > READABLE_BARS or int(offset[-1]) > 2 * READABLE_GPUS,
        "window": {"block": block, "blocks": shown, "from": start - begin, "to": stop - begin},
    }
    mapped = len(pieces) > MAPPED_ABOVE or offset[-1] > 4 * READABLE_GPUS
    return Gantt(
        _bars(result, pieces, name),
        _map(result, heat(pieces, result.cluster.gpus, begin, end), name, length) if mapped else None,
        data,
        facts,
        describe(kept, pieces, nodes, begin, end),
    )


def _waits_since(result: Result) -> NDArray[np.float64]:
    """Since when a job waited for each of its stretches: its arrival, or when it was preempted, [S]."""
    held = result.stretches
    again = np.append(np.zeros(min(len(held), 1), bool), held.job[1:] == held.job[:-1])
    return np.where(again, np.roll(held.end, 1), result.jobs.submit[held.job])


def packed(values: NDArray[Any] | str, kind: str = "") -> dict[str, str]:
    """Text, or numbers as the page's script has them (``Uint32`` or ``Float32``): compressed, in base 64."""
    raw = values.encode() if isinstance(values, str) else values.astype("<u4" if kind == "Uint32" else "<f4").tobytes()
    return {"kind": kind, "data": base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()}


def _line(name: Any) -> str:
    return " ".join(str(name).split())


def _bars(result: Result, pieces: Allocations, unit: str) -> Chart:
    """The chart without its bars: the page's script fills the source ``bars`` and sets ranges and ticks."""
    plot = empty(
        470, (0, 1), (1, 0), x_axis_label=f"{AXIS} ({unit})", y_axis_label="node, and its GPUs from top to bottom"
    )
    names = list(STYLES)
    empty_columns: dict[str, list[Any]] = {
        key: []
        for key in (
            "left",
            "right",
            "top",
            "bottom",
            "size",
            "job",
            "gpus",
            "tenant",
            "submit",
            "wait",
            "duration",
            "where",
        )
    }
    drawn = plot.quad(
        left="left", right="right", top="top", bottom="bottom", source=ColumnDataSource(empty_columns, name="bars"),
        fill_color=factor_cmap("size", [INK[fill] for fill, _, _ in STYLES.values()], names), line_color=INK["paper"],
        line_width=0.8, hatch_pattern=factor_hatch("size", [hatch for _, hatch, _ in STYLES.values()], names),
        hatch_color=INK["paper"], hatch_alpha=0.55, hatch_scale=8, hatch_weight=1,
    )  # fmt: skip
    tips = [
        ("job", "@job"),
        ("GPUs", "@gpus"),
        ("on", "@where"),
        ("arrived", "@submit"),
        ("waited", "@wait"),
        ("runs", "@duration"),
    ]
    if len(result.jobs.tenants) > 1:
        tips.insert(2, ("tenant", "@tenant"))
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=tips))
    plot.yaxis.ticker = FixedTicker(ticks=[], name="node labels")
    plot.yaxis.major_tick_line_color = None
    plot.ygrid.ticker = FixedTicker(ticks=[], name="node edges")
    plot.ygrid.grid_line_color = INK["hatch"]
    plot.xgrid.visible = False
    plot.xaxis.ticker = FixedTicker(ticks=[])
    if without_nodes(result):
        plot.yaxis.axis_label = "GPUs"
        meaning = (
            "A bar is a job on its GPUs, until it completes or is preempted; blank is idle. This placement counts free "
            "GPUs wherever they are, so rows are no real places: each job is drawn on the lowest free ones, and one that "
            "finds no neighbours comes in several bars."
        )
    else:
        meaning = (
            "A bar is a job on GPUs of one node, until it completes or is preempted; blank is idle. Narrow gaps that no job "
            "enters are fragmentation, and bars that begin together on several nodes are a gang. "
            + (
                "A share of a GPU is as high as its part of it."
                if (result.jobs.milli < WHOLE).any()
                else "Where the placement only counts a node's GPUs, each job is drawn on the lowest free ones."
            )
        )
    return Chart(
        "Jobs by node and GPU",
        plot,
        f"Bars of a window of {count(len(result.cluster), 'node')} and {count(len(pieces), 'piece')} of jobs, each from start "
        "to completion on the GPUs that it holds. Buttons above move the window.",
        meaning,
        [(symbol, name) for name, (_, _, symbol) in STYLES.items()],
        {name: fill for name, (fill, _, _) in STYLES.items()},
    )


def _map(result: Result, found: Heat, unit: str, length: float) -> Chart:
    begin, end = span(result)
    nodes = len(result.cluster)
    plot = empty(
        max(150, min(340, 90 + 5 * len(found.share))), (0, (end - begin) / length), (nodes, 0),
        x_axis_label=f"{AXIS} ({unit})", y_axis_label="node number",
    )  # fmt: skip
    plot.grid.visible = False
    plot.yaxis.ticker = BasicTicker(min_interval=1)
    mapper = LinearColorMapper(palette=[light for light, _ in ramp()], low=0, high=100)
    percentages = np.round(100 * found.share).astype(np.uint8)
    bottom = len(found.share) * found.nodes_each  # the last group may be short: its row reaches beyond the last node
    drawn = plot.image(
        image=[percentages], x=0, y=0, dw=(end - begin) / length, dh=bottom, color_mapper=mapper,
        anchor="bottom_left", origin="bottom_left",
    )  # fmt: skip
    plot.add_tools(
        HoverTool(
            renderers=[drawn],
            tooltips=[("allocated", "@image %"), ("time", f"$x{{0,0.0}} {unit}"), ("node", "$y{0,0}")],
        )
    )
    plot.add_layout(
        BoxAnnotation(
            name="window",
            fill_alpha=0,
            line_color=INK["second"],
            line_alpha=1,
            line_width=3,
            left=0,
            right=0,
            top=0,
            bottom=0,
        )
    )
    bar = ColorBar(
        color_mapper=mapper, height=8, padding=4, orientation="horizontal", ticker=FixedTicker(ticks=[0, 50, 100]),
        formatter=PrintfTickFormatter(format="%d %%"), background_fill_color=None, bar_line_color=INK["rule"],
        major_label_text_color=INK["ink"], major_label_text_font=FONT.value, major_tick_line_color=INK["ink"],
        title="GPUs allocated", title_text_color=INK["muted"], title_text_font=FONT.value, title_text_font_style="normal",
        title_text_font_size="12px",
    )  # fmt: skip
    plot.add_layout(bar, "above")
    each = f"{found.nodes_each} neighbouring nodes" if found.nodes_each > 1 else "a node"
    return Chart(
        "The whole cluster",
        plot,
        f"A map of {len(found.share)} rows, each {each}, against time: the share of GPUs allocated, "
        f"{100 * found.share.mean():.0f} per cent on average.",
        f"Each row is {each}, each column a stretch of time. Rows that remain pale are nodes that the placement fills last. "
        "Touch the map to see the jobs there in the chart below; the frame is what that shows.",
    )


def ramp() -> Sequence[tuple[str, str]]:
    """Colours of the map from idle to full, for light and dark pages: from the paper to the ink of our own bars."""

    def between(low: str, high: str, share: float) -> str:
        parts = ((int(low[i : i + 2], 16), int(high[i : i + 2], 16)) for i in (1, 3, 5))
        return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in parts)

    idle, full = palette.COLORS["panel"], palette.COLORS["ours"]
    return [tuple(between(idle[mode], full[mode], i / (STEPS - 1)) for mode in (0, 1)) for i in range(STEPS)]  # type: ignore[misc]
