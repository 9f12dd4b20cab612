"""All operators of a machine in one table: how close to the limit and to the best peer each comes, and where least
close."""

import statistics
from collections.abc import Iterable, Mapping

from weft.drawing.quantities import NONE, dtype_key, is_rung, percent, ratio
from weft.records import Measurement, latest
from weft.report.markdown import grid

EARLIER = "‡"
HEAD = ("operator", "direction", "dtype", "points")
NUMBERS = ("share of ceiling, median", "lowest, at", "ratio to best peer, median", "lowest, at")


def summary_table(measurements: Iterable[Measurement], families: Mapping[str, str]) -> str:
    """One row for each operator, direction and dtype; at each point our fastest implementation counts. Below it the
    operators that were never timed.

    Args:
        measurements: of one machine; the newest of each point counts. Teaching versions, wrong results and warm caches
            are left out.
        families: family of each operator, whose page its row links to; records of other operators are left out.
    """
    timed = [
        m
        for m in latest(measurements)
        if m.metric == "time" and m.cache == "cold" and m.device == "cuda" and m.operator in families
        if "wrong" not in m.details and not is_rung(m)
    ]
    fastest: dict[tuple[str, ...], Measurement] = {}
    peers: dict[tuple[str, ...], list[Measurement]] = {}
    for m in timed:
        point = (m.operator, m.direction, m.dtype, m.workload)
        if not m.ours:
            peers.setdefault(point, []).append(m)
        elif point not in fastest or m.time_us < fastest[point].time_us:
            fastest[point] = m
    rows: dict[tuple[str, str, str], list[tuple[Measurement, list[Measurement]]]] = {}
    for at, m in fastest.items():
        rows.setdefault((m.operator, m.direction, m.dtype), []).append((m, peers.get(at, [])))
    if not rows:
        return "*No measurements yet.*"
    body = []
    for row in sorted(rows, key=lambda row: (row[0], row[1] != "forward", dtype_key(row[2]))):
        link = f"[{row[0]}]({families[row[0]]}.md#{row[0]})"
        body.append([link, *row[1:], str(len(rows[row])), *_share([m for m, _ in rows[row]]), *_ratio(rows[row])])
    lines = [grid([*HEAD, *NUMBERS], body, numbers_from=len(HEAD) - 1)]
    if any(EARLIER in cell for row in body for cell in row):
        lines.append(
            f"{EARLIER} timed in an earlier run, and faster there than each peer that was timed beside ours: "
            "a quotient of medians"
        )
    if never := sorted(set(families) - {m.operator for m in fastest.values()}):
        lines.append("Not timed beside peers yet: " + ", ".join(f"`{name}`" for name in never) + ".")
    return "\n\n".join(lines)


def _share(points: list[Measurement]) -> tuple[str, str]:
    found = [(m.share_of_ceiling, m.workload) for m in points if m.share_of_ceiling is not None]
    if not found:
        return NONE, NONE
    lowest, where = min(found)
    return percent(statistics.median(share for share, _ in found)), f"{percent(lowest)} `{where}`"


def _ratio(points: list[tuple[Measurement, list[Measurement]]]) -> tuple[str, str]:
    """Ratios of pairs within a run; where a peer was faster in an earlier run than all peers of that run, the lower
    counts."""
    found = []
    for m, peers in points:
        if m.ratio_to_best_peer is not None:
            quotients = [
                (p.time_us / m.time_us, m.workload, p.implementation + EARLIER) for p in peers if p.run != m.run
            ]
            found.append(min([(m.ratio_to_best_peer, m.workload, m.best_peer or ""), *quotients]))
    if not found:
        return NONE, NONE
    lowest, where, peer = min(found)
    return ratio(statistics.median(value for value, _, _ in found)), f"{ratio(lowest)} {peer} `{where}`"
