"""Bus bandwidth and time over the size, log-log, beside the fit and the link's peak."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from weft.comm import verdict
from weft.drawing.palette import LIGHT as INK

MARKS = "os^vD<>Ph*Xd"


def check(path: str) -> None:
    """Before anything is measured.

    Raises:
        ModuleNotFoundError: no matplotlib.
        ValueError: another suffix than .png or .svg, or no such folder.
    """
    file = Path(path)
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"plot is '{path}'; expected a file that ends in .png or .svg")
    if not file.parent.is_dir():
        raise ValueError(f"plot is '{path}'; there is no folder '{file.parent}'")
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install 'weft[pictures]'", name="matplotlib")


def draw(records: Sequence[dict[str, Any]], about: dict[str, Any], path: str) -> Path:
    """Writes the picture and returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    file = Path(path)
    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor=INK["paper"])
    FigureCanvasAgg(figure)
    rate, time = figure.subplots(1, 2)
    timed = [r for r in records if r["bytes"]]
    for i, (name, group) in enumerate(groupby(timed, key=lambda r: r["collective"])):
        rows = list(group)
        sizes = [r["bytes"] for r in rows]
        mark = MARKS[i % len(MARKS)]
        (line,) = rate.plot(sizes, [r["busbw"] for r in rows], marker=mark, markersize=4, label=name)
        time.plot(sizes, [r["p50_us"] for r in rows], marker=mark, markersize=4, color=line.get_color(), linestyle="")
        time.fill_between(
            sizes, [r["p20_us"] for r in rows], [r["p99_us"] for r in rows], color=line.get_color(), alpha=0.15
        )
        if found := verdict.model(rows):
            between = [sizes[0] * (sizes[-1] / sizes[0]) ** (k / 200) for k in range(201)]
            time.plot(between, [found.predict(s) for s in between], color=line.get_color(), linewidth=1)
    peak = about.get("peak", {})
    if peak.get("gb_s"):
        rate.axhline(peak["gb_s"], color=INK["muted"], linestyle="--", linewidth=1, label=f"{peak['what']}")
    rate.set(ylabel="bus bandwidth, GB/s", title="Bus bandwidth")
    time.set(ylabel="time, us", title="Time: medians, p20 to p99, and the alpha-beta fit")
    for axes in (rate, time):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size, bytes")
        axes.grid(color=INK["rule"], linewidth=0.5)
        axes.set_facecolor(INK["paper"])
    rate.legend(fontsize=7, frameon=False)
    if records:
        r = records[0]
        figure.suptitle(f"{r['backend']}, {r['ranks']} ranks, {r['dtype']}", fontsize=10)
    figure.savefig(file, dpi=140)
    return file
