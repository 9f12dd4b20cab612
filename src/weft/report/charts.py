"""The page's bars and curves: ceilings, shares of them, ratios to the best peer, and training.

Each can be read without colour, by direct labels, hatches and markers, and bars that lose look like bars that win.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker

from weft.drawing.chart import Bar, Chart, bars, empty, hover, round_ticks, tip_of
from weft.drawing.palette import LIGHT as INK
from weft.drawing.quantities import (
    distinct,
    figures,
    implementation_key,
    known,
    listing,
    percent,
    point_key,
    ratio,
    si,
)
from weft.records import Measurement


def ceiling_bars(ceilings: Sequence[Measurement], unit: str) -> Chart | None:
    """The measured ceilings of one unit: bandwidths by read:write mix, or matrix rates by dtype."""
    values = {m.implementation: m.details["value"] for m in ceilings if m.details.get("unit") == unit}
    if not values or max(values.values()) <= 0:
        return None
    drawn = [Bar(name, value, si(value, unit), True, {name: si(value, unit)}) for name, value in values.items()]
    top = max(values.values())
    scale, prefix = next(((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M")) if top >= s), (1.0, ""))
    ticks = {tick * scale: f"{tick:g}" for tick in round_ticks(top / scale)}
    plot = bars([("", drawn)], axis=f"{prefix}{unit}", end=1.5 * top, ticks=ticks)
    description = "Bars: " + "; ".join(f"{bar.name} {bar.text}" for bar in drawn) + "."
    if unit == "B/s":
        return Chart(
            "Memory bandwidth by read:write mix",
            plot,
            description,
            "Upper bounds for memory-bound operators on this machine: one that reads and writes as much as a copy "
            "takes at least the time of a copy of the same bytes.",
        )
    memory = max((m.details["value"] for m in ceilings if m.details.get("unit") == "B/s"), default=0)
    often = f"each byte from memory must serve about {figures(top / memory, 2)} FLOPs, or" if memory else "otherwise"
    return Chart(
        "Matrix rate by dtype",
        plot,
        description,
        f"The rate of a large matrix product. Only matrix products come close to it: {often} memory is the limit.",
    )


def share_bars(measurements: Sequence[Measurement], name: str) -> Chart | None:
    """Share of the ceiling for every implementation at every point of one operator and direction."""
    chosen = [m for m in measurements if known(m.share_of_ceiling)]
    if not chosen:
        return None

    def share(m: Measurement) -> float:
        return m.share_of_ceiling or 0.0

    groups = _groups(chosen, lambda m: Bar(m.implementation, share(m), percent(share(m)), m.ours, tip_of(m)))
    plot = bars(
        groups,
        axis="share of the measured ceiling (%)",
        end=1.3 * max(1.0, *map(share, chosen)),
        ticks={tick: f"{100 * tick:.0f}" for tick in (0, 0.25, 0.5, 0.75, 1)},
        line=1.0,
    )
    ranges = []
    for implementation in distinct(m.implementation for m in sorted(chosen, key=implementation_key)):
        shares = [share(m) for m in chosen if m.implementation == implementation]
        ranges.append(f"{implementation} {percent(min(shares))} to {percent(max(shares))}")
    limits = listing(distinct(m.limit_name or "" for m in chosen)) or "the machine"
    return Chart(
        f"{name}: share of the ceiling",
        plot,
        f"Bars of {len(groups)} points: {'; '.join(ranges)}. Every number is in the table of all measurements.",
        f"The dashed line is what this machine's ceiling ({limits}) allows for the bytes and FLOPs that the operator "
        "cannot avoid. The gap between a bar's end and the line is time that a better kernel could save. A few tenths "
        "of a percent beyond the line are measurement noise.",
    )


def ratio_bars(measurements: Sequence[Measurement], name: str) -> Chart | None:
    """How many times as fast as the best peer each of our implementations is, from 1 outwards on a log scale."""
    chosen = [m for m in measurements if known(m.ratio_to_best_peer) and ahead(m) > 0]
    if not chosen:
        return None

    def bar(m: Measurement) -> Bar:
        beside = f" vs {m.best_peer}" if m.best_peer else ""
        return Bar(m.implementation, ahead(m), ratio(ahead(m)) + beside, True, tip_of(m), m.ratio_p20, m.ratio_p80)

    ends = [value for m in chosen for value in (ahead(m), m.ratio_p20, m.ratio_p80) if known(value) and value]
    low, high = min(0.8, *(value / 1.05 for value in ends)), max(1.25, *(value * 1.05 for value in ends))
    wide = high / low > 4
    ticks = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if wide else (0.3, 0.4, 0.6, 0.8, 1, 1.25, 1.6, 2, 2.5)
    plot = bars(
        _groups(chosen, bar),
        axis="best peer's time ÷ this time (×, log)",
        start=low,
        base=1.0,
        end=high * (high / low) ** 0.75,  # room for the numbers
        ticks={tick: f"{tick:g}×" for tick in ticks if low <= tick <= high},
        line=1.0,
        log=True,
    )
    worst, best = (pick(chosen, key=ahead) for pick in (min, max))
    level = sum(ahead(m) >= 1 for m in chosen)
    return Chart(
        f"{name}: against the best peer",
        plot,
        f"Bars of {len(chosen)} ratios: {level} at or above 1; lowest {ratio(ahead(worst))}"
        f" at {worst.dtype} {worst.workload}, highest {ratio(ahead(best))} at {best.dtype} {best.workload}.",
        "Right of the line weft's kernel was faster than the best peer of the same run, left of it slower. "
        "A whisker spans the middle 60\u00a0% of the paired runs: one that crosses the line is a draw.",
    )


def ahead(m: Measurement) -> float:
    return m.ratio_to_best_peer or 0.0


def loss_curves(run: dict[str, Any]) -> Chart | None:
    """Loss on the training and on the held-out images, epoch by epoch."""
    curves = {"training images": run.get("train_loss") or [], "held-out images": run.get("test_loss") or []}
    values = [value for curve in curves.values() for value in curve]
    if not values:
        return None
    plot = _curves(curves, "cross entropy (nats per image)", 0.0, 1.08 * max(values))
    return Chart(
        "Loss",
        plot,
        _told(curves),
        "Both should fall together. Where the training loss falls while the held-out loss rises, the network overfits.",
        [("● ─", "training images"), ("■ ┄", "held-out images")],
    )


def accuracy_curve(run: dict[str, Any]) -> Chart | None:
    """Accuracy on the held-out images in percent, epoch by epoch."""
    curves = {"held-out images": [100 * share for share in run.get("test_accuracy") or []]}
    values = curves["held-out images"]
    if not values:
        return None
    return Chart(
        "Accuracy on held-out images",
        _curves(curves, "accuracy (%)", min(values) - 2, 101),
        _told(curves),
        "The share of unseen digits that it classifies correctly. Guessing would give 10\u00a0%.",
    )


def _curves(curves: dict[str, list[float]], axis: str, bottom: float, top: float) -> Any:
    """Lines over the epochs; held-out images have squares and, beside another line, dashes."""
    epochs = max(map(len, curves.values()))
    plot = empty(260, (0.5, epochs + 0.5), (bottom, top), x_axis_label="epoch", y_axis_label=axis)
    plot.xaxis.ticker = FixedTicker(ticks=list(range(1, epochs + 1, max(1, round(epochs / 8)))))
    for name, curve in curves.items():
        held_out = name == "held-out images"
        color = INK["ours" if held_out else "second"]
        x = list(range(1, len(curve) + 1))
        dash = "dashed" if held_out and len(curves) > 1 else "solid"
        plot.line(x, curve, line_color=color, line_width=2, line_dash=dash)
        marker = "square" if held_out else "circle"
        source = ColumnDataSource({"x": x, "y": curve})
        dots = plot.scatter("x", "y", source=source, marker=marker, size=7, color=color)
        tips = [{"of": name, "epoch": f"{epoch}", axis: f"{value:.4g}"} for epoch, value in zip(x, curve, strict=True)]
        hover(plot, dots, tips, {"x": x, "y": curve})
    return plot


def _told(curves: dict[str, list[float]]) -> str:
    told = (f"{name} from {c[0]:.3g} to {c[-1]:.3g} in {len(c)} epochs" for name, c in curves.items() if c)
    return f"Lines: {'; '.join(told)}."


def _groups(measurements: Iterable[Measurement], bar: Callable[[Measurement], Bar]) -> list[tuple[str, list[Bar]]]:
    """Bars in groups, one for each measured point, headed by what the point is."""
    measurements = sorted(measurements, key=lambda m: (point_key(m), implementation_key(m)))
    caches, devices = {m.cache for m in measurements}, {m.device for m in measurements}
    groups: dict[str, list[Bar]] = {}
    for m in measurements:
        heading = f"{m.dtype} {m.workload.replace(',', ', ')}"
        heading += f" {m.cache}" * (len(caches) > 1) + f" {m.device}" * (len(devices) > 1)
        groups.setdefault(heading, []).append(bar(m))
    return list(groups.items())
