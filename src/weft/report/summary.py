"""All operators of a machine in one table: how near to the limit and the best peer each comes, and where least near."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from weft.drawing.quantities import NONE, dtype_key, is_rung, percent, ratio
from weft.records import Measurement, latest
from weft.report.markdown import grid

HEAD = ("operator", "direction", "dtype", "points")
EARLIER = "‡"
NUMBERS = ("share of ceiling, median", "least, at", "ratio to best peer, median", "least, at")


def summary_table(measurements: Iterable[Measurement], operators: Iterable[str] = ()) -> str:
    """A row for each operator, direction and dtype; of each point the fastest of our implementations counts. Behind it the
    operators that were never timed.

    Args:
        measurements: of one machine; of points measured twice the newest counts. Teaching versions, results that were wrong and
            warm caches are left out.
        operators: names of all that there are; records of others are left out (none: those of the records).
    """
    fastest: dict[tuple[str, ...], Measurement] = {}
    known = set(operators)
    measurements = list(measurements)
    timed = [
        m
        for m in measurements
        if m.metric == "time" and m.cache == "cold" and m.device == "cuda" and m.ours
        if not is_rung(m) and (not known or m.operator in known)
    ]
    for m in latest(timed):
        if "wrong" in m.details:
            continue
        point = (m.operator, m.direction, m.dtype, m.workload)
        if point not in fastest or m.time_us < fastest[point].time_us:
            fastest[point] = m
    others: dict[tuple[str, ...], list[Measurement]] = {}
    for m in latest(m for m in measurements if m.metric == "time" and m.cache == "cold" and m.device == "cuda"):
        if not m.ours and "wrong" not in m.details:
            others.setdefault((m.operator, m.direction, m.dtype, m.workload), []).append(m)
    rows: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in fastest.values():
        rows.setdefault((m.operator, m.direction, m.dtype), []).append(m)
    if not rows:
        return "*No measurements yet.*"
    order = sorted(rows, key=lambda row: (row[0], row[1] != "forward", dtype_key(row[2])))
    body = [[*row, str(len(rows[row])), *_share(rows[row]), *_ratio(rows[row], others)] for row in order]
    lines = [grid([*HEAD, *NUMBERS], body, numbers_from=len(HEAD) - 1)]
    if any(EARLIER in cell for row in body for cell in row):
        faster = "timed in an earlier run, and faster there than each peer beside which ours was timed"
        lines.append(f"{EARLIER} {faster}: a quotient of medians")
    if never := sorted(known - {m.operator for m in timed}):
        lines.append("Not timed beside peers yet: " + ", ".join(f"`{name}`" for name in never) + ".")
    return "\n\n".join(lines)


def _share(points: list[Measurement]) -> tuple[str, str]:
    found = [(m.share_of_ceiling, m.workload) for m in points if m.share_of_ceiling is not None]
    if not found:
        return NONE, NONE
    least, where = min(found)
    return percent(statistics.median(share for share, _ in found)), f"{percent(least)} `{where}`"


def _ratio(points: list[Measurement], others: dict[tuple[str, ...], list[Measurement]]) -> tuple[str, str]:
    """Of pairs within a run; where a peer was faster in an earlier one than all of that run, the lesser of both counts."""
    found = []
    for m in points:
        if m.ratio_to_best_peer is not None:
            apart = [p for p in others.get((m.operator, m.direction, m.dtype, m.workload), ()) if p.run != m.run]
            quotients = [(p.time_us / m.time_us, m.workload, p.implementation + EARLIER) for p in apart if p.time_us]
            found.append(min([(m.ratio_to_best_peer, m.workload, m.best_peer), *quotients]))
    if not found:
        return NONE, NONE
    least, where, peer = min(found)
    return ratio(statistics.median(value for value, _, _ in found)), f"{ratio(least)} {peer} `{where}`"
