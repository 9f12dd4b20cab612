"""The picture of ``weft topology``."""

import math
from pathlib import Path

from weft.drawing.palette import LIGHT as INK
from weft.hardware.topology import Topology


def draw(found: Topology, path: str) -> Path:
    """A picture: GPUs in a circle, NVLinks as lines by their number, NUMA nodes as colours, network cards beside the GPU
    that is nearest.

    Raises:
        ModuleNotFoundError: no matplotlib.
        ValueError: another suffix than .png or .svg.
    """
    file = Path(path)
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"picture is '{path}'; expected a file that ends in .png or .svg")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "a picture needs matplotlib: pip install 'weft[pictures]'", name=missing.name
        ) from missing
    figure = Figure(figsize=(7, 6.4), layout="constrained", facecolor=INK["paper"])
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set(xlim=(-1.7, 1.7), ylim=(-1.6, 1.6), aspect="equal")
    axes.axis("off")
    colors = [INK[name] for name in ("ours", "second", "good", "warn", "bad", "muted")]
    spots = {
        f"GPU{g.index}": (math.cos(a), math.sin(a))
        for g in found.gpus
        for a in [math.pi / 2 - 2 * math.pi * g.index / max(len(found.gpus), 1)]
    }
    numa = {f"GPU{g.index}": g.numa for g in found.gpus}
    for p in found.pairs:
        (x0, y0), (x1, y1) = spots[f"GPU{p.a}"], spots[f"GPU{p.b}"]
        linked = p.kind.startswith("NV")
        axes.plot(
            [x0, x1], [y0, y1], zorder=1, color=INK["ink" if linked else "hatch"],
            linewidth=0.5 + int(p.kind[2:]) / 6 if linked else 0.8, linestyle="-" if p.peer else ":",
        )  # fmt: skip
        if len(found.gpus) <= 4:
            axes.text((x0 + x1) / 2, (y0 + y1) / 2 + 0.06, p.kind, ha="center", fontsize=8, color=INK["ink"])
    order = ("PIX", "PXB", "PHB", "NODE", "SYS")
    beside: dict[str, int] = {}
    for i, nic in enumerate(found.nics):
        if nic.nearest:
            at = min(nic.nearest, key=lambda g: order.index(nic.nearest[g]))
            x, y = spots[f"GPU{at}"]
            k = beside[f"GPU{at}"] = beside.get(f"GPU{at}", 0) + 1
            spots[nic.name] = (1.42 * x, 1.42 * y - 0.16 * (k - 1))
            axes.plot([x, 1.42 * x], [y, 1.42 * y], color=INK["hatch"], linewidth=0.8, zorder=1)
        else:
            spots[nic.name] = (-1.2 + 0.5 * i, -1.3)
        numa[nic.name] = nic.numa
    if not found.gpus:
        for node in found.nodes:
            spots[f"NUMA {node.index}"] = (-0.9 + 0.9 * node.index, 0.4)
            numa[f"NUMA {node.index}"] = node.index
    for name, (x, y) in spots.items():
        axes.text(
            x, y, name, ha="center", va="center", fontsize=9, color=INK["paper"], zorder=2,
            bbox={"boxstyle": "round,pad=0.4", "facecolor": colors[(numa[name] or 0) % len(colors)], "edgecolor": "none"},
        )  # fmt: skip
    axes.set_title("; ".join([f"{len(found.gpus)} GPUs", f"{len(found.nodes)} NUMA nodes (colours)"]), fontsize=9)
    figure.savefig(file, dpi=140)
    return file
