"""The table of ``weft bench --random`` runs: one line a family, then the points that are furthest behind."""

from collections.abc import Sequence

from weft.bench.random_points import by_family, distribution, worst
from weft.drawing.quantities import percent, ratio
from weft.records import Measurement
from weft.report.markdown import grid
from weft.report.tables import provenance


def random_table(measurements: Sequence[Measurement]) -> str:
    """Of the newest run.

    Args:
        measurements: of random points, of one machine.
    """
    newest = max(measurements, key=lambda m: m.time).run
    points = [m for m in measurements if m.run == newest]
    seed = points[0].details["seed"]
    body = []
    for family, rows in (*by_family(points).items(), ("**all**", points)):
        d = distribution(rows)
        numbers = (ratio(d[name]) for name in ("geometric_mean", "median", "least"))
        body.append([family, str(d["points"]), percent(d["level_or_ahead"]), *numbers, f"{d['host_us']:.1f}"])
    head = ["family", "points", "within 3 % of the best peer", "geometric mean", "median", "least", "host time, µs"]
    behind = [
        [f"{m.operator} {m.direction}", m.dtype, f"`{m.workload}`", ratio(m.ratio_to_best_peer), m.best_peer or ""]
        for m in worst(points)
    ]
    return "\n".join(
        [
            f"Public functions at the shapes that `weft bench --random {points[0].details['count']} --seed {seed:#x}` draws,",
            "against the better of PyTorch and `torch.compile`; points more than 3 % behind are the median of three timings.\n",
            grid(head, body, numbers_from=1),
            "\nFurthest behind:\n",
            grid(["operator", "dtype", "workload", "ratio", "best peer"], behind, numbers_from=3),
            "",
            provenance(points),
        ]
    )
