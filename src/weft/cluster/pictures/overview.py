"""A static overview by matplotlib: a column of panels for each policy, with the same axes across: the time, from the first
arrival, that the longest of them shows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.cluster import allocations
from weft.cluster.metrics import size_classes
from weft.cluster.pictures import compare, distributions, heat_map, series, time_axis
from weft.cluster.pictures.page import check
from weft.cluster.result import Result
from weft.drawing.palette import LIGHT as INK

MOST_COLUMNS = 4
LINES = (("-", "ours"), ("--", "second"), (":", "muted"))


def overview(path: Path, results: Sequence[Result]) -> None:
    """Writes what the suffix of ``path`` says; of each policy the first run, of many policies the first four.

    Raises:
        ModuleNotFoundError: no matplotlib.
    """
    check(results)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"a {path.suffix} needs matplotlib: pip install 'weft[pictures]' (a .html does not)", name=missing.name
        ) from missing

    policies = compare.policies(results)[:MOST_COLUMNS]
    figure = Figure(figsize=(1.5 + 5.5 * len(policies), 9.5), layout="constrained", facecolor=INK["paper"])
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        4, len(policies), squeeze=False, sharex="row", sharey="row", gridspec_kw={"height_ratios": (1.4, 1, 1, 1.2)}
    )
    spans = [time_axis.span(policy.runs[0]) for policy in policies]
    longest = max(end - begin for begin, end in spans)
    name, length = time_axis.unit(longest)
    for column, (policy, (begin, _)) in enumerate(zip(policies, spans, strict=True)):
        result, end = policy.runs[0], begin + longest
        held = allocations.of(result)
        found = series.over_time(result, held, 400, (begin, end))
        where, used, queue, spread = axes[:, column]
        share = heat_map.heat(held, result.cluster.gpus, begin, end).share
        extent = (0, (end - begin) / length, result.cluster.total_gpus, 0)
        where.imshow(100 * share, aspect="auto", cmap="Greys", vmin=0, vmax=100, extent=extent, interpolation="nearest")
        where.set_title(f"{policy.name}\nGPUs allocated by node, white 0 % to black 100 %", fontsize=10)
        for panel, curve, ink in ((used, found.allocated, "ours"), (queue, found.waiting_jobs, "second")):
            panel.stairs(curve.mean, (curve.edge - begin) / length, color=INK[ink], fill=True, alpha=0.3)
            panel.stairs(curve.mean, (curve.edge - begin) / length, color=INK[ink], baseline=None)
            panel.set_xlabel(f"time since the first job arrived ({name})")
        where.set_xlabel(f"time since the first job arrived ({name})")
        used.axhline(result.cluster.total_gpus, color=INK["ink"], linestyle="--", linewidth=1)
        ran = result.counted
        jct = np.maximum(distributions.job_times(result)["jct"], 1e-3)
        for (label, members), (dash, ink) in zip(size_classes(result.jobs.gpus).items(), LINES, strict=False):
            if (members & ran).any():
                value, rank = distributions.quantiles(jct[members & ran])
                spread.plot(value, 100 * rank, dash, color=INK[ink], label=label, drawstyle="steps-post")
        if ran.any():
            spread.set_xscale("log")
            spread.legend(fontsize=8)
            low, high = spread.get_xlim()
            ticks = distributions.time_ticks(low, high)
            spread.set_xticks(list(ticks), list(ticks.values()))
            spread.minorticks_off()
        spread.set_ylim(0, 102)
        spread.set_xlabel("job completion time (log)")
    most = max(policy.runs[0].cluster.total_gpus for policy in policies)
    axes[0, 0].set_ylim(most, 0)  # the first node on top
    axes[1, 0].set_ylim(0, 1.05 * most)
    axes[2, 0].set_ylim(bottom=0)  # now that all are drawn
    for row in axes[:3]:
        row[0].set_xlim(0, longest / length)
    for axis, label in zip(
        axes[:, 0], ("GPUs, node by node", "GPUs allocated (all: dashed)", "jobs waiting", "jobs (%)"), strict=True
    ):
        axis.set_ylabel(label)
    figure.savefig(path, dpi=130)
