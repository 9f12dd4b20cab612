"""The roofline chart: what each operator reached, below what its arithmetic intensity allows on this machine."""

import math
from collections.abc import Sequence
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker

from weft.drawing.chart import Chart, empty, hover, tip_of, write
from weft.drawing.palette import LIGHT as INK
from weft.drawing.quantities import SPACE, distinct, figures, listing, si
from weft.records import Measurement

MARKERS = {
    "circle": "●",
    "square": "■",
    "triangle": "▲",
    "diamond": "◆",
    "inverted_triangle": "▼",
    "hex": "⬢",
    "star": "★",
    "plus": "✚",
    "circle_dot": "◉",
    "square_dot": "▣",
    "triangle_dot": "◬",
    "diamond_dot": "◈",
}


def roofline(measurements: Sequence[Measurement], ceilings: Sequence[Measurement], device: str) -> Chart | None:
    """Arithmetic intensity against achieved FLOP/s, log-log, with the measured ceilings as roofs.

    ``None`` where no measurement says its bytes and FLOPs or no bandwidth was measured.
    """
    points = [m for m in measurements if m.device == device and m.flops and m.bytes_moved and m.time_us > 0]
    values = [(m.implementation, m.details["value"], m.details.get("unit")) for m in ceilings if m.details["value"] > 0]
    slopes = [(name, value) for name, value, unit in values if unit == "B/s"]
    roofs = sorted(((name, value) for name, value, unit in values if unit == "FLOP/s"), key=lambda roof: -roof[1])
    if not points or not slopes:
        return None
    memory_name, memory = max(slopes, key=lambda slope: slope[1])  # the fastest: no point can lie above it
    ridges = [value / memory for _, value in roofs]

    left = 10 ** math.floor(math.log10(min(map(intensity, points))) - 0.2)
    if ridges:  # the lowest ridge and the slope before it belong to the picture
        left = min(left, 10 ** math.floor(math.log10(min(ridges)) - 1.3))
    right = 10 ** math.ceil(math.log10(max([*map(intensity, points), *ridges])) + 0.3)
    highest = roofs[0][1] if roofs else right * memory
    top = 2.5 * max([highest, *map(rate, points)])
    bottom = min([left * memory, *map(rate, points)]) / 2
    plot = empty(
        460,
        (left, right),
        (bottom, top),
        x_axis_type="log",
        y_axis_type="log",
        x_axis_label="arithmetic intensity (FLOP/byte)",
        y_axis_label="achieved FLOP/s",
    )
    plot.xaxis.ticker, plot.xaxis.major_label_overrides = _decades(left, right)
    plot.yaxis.ticker, plot.yaxis.major_label_overrides = _decades(bottom, top)

    plot.line([left, highest / memory], [left * memory, highest], line_color=INK["ink"], line_width=1.8)
    label = f"memory {si(memory, 'B/s')} ({memory_name})"
    write(plot, x=[left], y=[left * memory], text=[label], x_offset=22, y_offset=2)
    for crowd in _crowds(roofs):
        for _, value in crowd:
            plot.line(
                [value / memory, right], [value, value], line_color=INK["second"], line_width=1.8, line_dash="dashed"
            )
        label = ", ".join(f"{name.removesuffix(' matrix')} {si(value, 'FLOP/s')}" for name, value in crowd)
        label = label.replace(label[label.rindex(SPACE) :] + ",", ",")  # the unit once, where it is the same
        # Left of the ridge and above the slope there can be no point: room for the label.
        write(plot, x=[crowd[0][1] / memory], y=[crowd[0][1]], text=[label], text_align="right", x_offset=-8)

    operators = distinct(f"{m.operator} {m.direction}" for m in points)
    markers = {name: list(MARKERS)[i % len(MARKERS)] for i, name in enumerate(operators)}
    for ours in (False, True):
        for name in operators:
            chosen = [m for m in points if m.ours == ours and f"{m.operator} {m.direction}" == name]
            if chosen:
                _scatter(plot, name, markers[name], chosen)
    best = max(points, key=rate)
    return Chart(
        "Work per byte against work per second",
        plot,
        f"{len(points)} points of {listing(operators)} under a memory roof of {si(memory, 'B/s')}"
        + "".join(f", {name} {si(value, 'FLOP/s')}" for name, value in roofs)
        + f". Highest: {best.operator} ({best.implementation}, {best.dtype}) at {si(rate(best), 'FLOP/s')}.",
        "A kernel cannot exceed its roof. Below the slope it is memory-bound: more arithmetic would be free, fewer "
        "bytes would make it faster. Below a flat part it is compute-bound. A point's distance to its roof is what there "
        "is to gain.",
        [
            *((MARKERS[markers[name]], name) for name in operators),
            ("filled", "weft"),
            ("hollow", "others"),
            ("╱", "memory"),
            ("┄", "matrix products"),
        ],
    )


def intensity(m: Measurement) -> float:
    """FLOPs for each byte moved."""
    return (m.flops or 0) / (m.bytes_moved or 1)


def rate(m: Measurement) -> float:
    """FLOP/s achieved."""
    return (m.flops or 0) / m.time_us * 1e6


def _scatter(plot: Any, name: str, marker: str, points: list[Measurement]) -> None:
    """Points of one operator and side: weft's filled, others hollow."""
    ours = points[0].ours
    columns = {"x": list(map(intensity, points)), "y": list(map(rate, points))}
    dots = plot.scatter(
        "x",
        "y",
        source=ColumnDataSource(columns),
        marker=marker,
        size=9,
        line_color=INK["ours" if ours else "hatch"],
        line_width=1.2,
        fill_color=INK["ours"] if ours else None,
        fill_alpha=0.85,
    )
    tips = [
        {"operator": name, "reached": f"{si(rate(m), 'FLOP/s')} at {figures(intensity(m))} FLOP/byte"} | tip_of(m)
        for m in points
    ]
    hover(plot, dots, tips, columns)


def _crowds(roofs: list[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """Roofs, highest first, in crowds so narrow that their labels would overlap; a crowd shares one label."""
    crowds: list[list[tuple[str, float]]] = []
    for roof in roofs:
        if crowds and crowds[-1][-1][1] / roof[1] < 1.6:
            crowds[-1].append(roof)
        else:
            crowds.append([roof])
    return crowds


def _decades(low: float, high: float) -> tuple[Any, dict[float, str]]:
    """A tick at each power of ten, fewer where they would crowd, written 0.1, 10, 10 G, 1 T."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    ticks = [10.0**power for power in range(first, last + 1, 1 + (last - first) // 7)]
    prefixes = {0: "", 3: " k", 6: " M", 9: " G", 12: " T", 15: " P"}

    def written(tick: float) -> str:
        thousands = 3 * math.floor(round(math.log10(tick)) / 3)
        return f"{tick / 10.0**thousands:g}{prefixes[thousands]}" if thousands in prefixes else f"{tick:g}"

    return FixedTicker(ticks=ticks), {tick: written(tick) for tick in ticks}
