"""Measured tables in Markdown, from records. Each ends with GPU, driver, versions, commit and date of its rows."""

from collections.abc import Iterable, Sequence

from weft.definition import UnknownName
from weft.drawing.quantities import (
    NONE,
    distinct,
    figures,
    implementation_key,
    is_ceiling,
    is_rung,
    percent,
    point_key,
    ratio,
    si,
    spread,
)
from weft.records import Measurement, latest
from weft.report.markdown import cell, grid

EMPTY = "*No measurements yet.*"


def points_table(measurements: Iterable[Measurement]) -> str:
    """One row for each point (workload, dtype), with the median time of each implementation in µs, and for each of ours
    its share of the measured ceiling and its ratio to the best peer with p20–p80. The fastest right result is bold.

    Args:
        measurements: of one operator, direction and machine; the newest of each point counts.
    """
    newest = sorted(latest(measurements), key=point_key)
    if not newest:
        return EMPTY
    columns = sorted({m.implementation: m for m in newest}.values(), key=implementation_key)
    ours = [m.implementation for m in columns if m.ours]
    rows: dict[tuple[str, str], dict[str, Measurement]] = {}
    for m in newest:
        rows.setdefault((m.workload, m.dtype), {})[m.implementation] = m
    head = ["workload", "dtype", *(f"{m.implementation} (µs)" for m in columns)]
    for name in ours:
        head += [f"{name}: share of ceiling", f"{name}: ratio to best peer (p20–p80)"]
    body, other_run = [], False
    for (workload, dtype), cells in rows.items():
        run = max((m for m in cells.values() if m.ours), key=lambda m: m.time, default=next(iter(cells.values()))).run
        fastest = min((m.time_us for m in cells.values() if not _wrong(m)), default=None)
        row = [f"`{workload}`", dtype]
        for column in columns:
            timed = cells.get(column.implementation)
            if timed is None:
                row.append(NONE)
                continue
            text = figures(timed.time_us)
            if timed.time_us == fastest and len(cells) > 1:
                text = f"**{text}**"
            if timed.run != run:
                other_run = True
            row.append(text + ("†" if _wrong(timed) else "") + ("‡" if timed.run != run else ""))
        for name in ours:
            row += [percent(cells[name].share_of_ceiling), _ratio(cells[name])] if name in cells else [NONE, NONE]
        body.append(row)
    lines = [grid(head, body, numbers_from=2), "", provenance(newest)]
    if wrong := [m for m in newest if _wrong(m)]:
        worst = max(m.error or 0.0 for m in wrong)  # results that must be exact have no such number
        error = f"error up to {worst:.2f} times the allowed one on this data" if worst else "not the exact result"
        lines += ["", f"† wrong: {error} (`weft verify` checks ours)"]
    if other_run:
        lines += ["", "‡ timed in an earlier run than the rest of its row; ratios compare within one run"]
    return "\n".join(lines)


def rungs_table(measurements: Iterable[Measurement]) -> str:
    """One row for each point and step of a ladder: median time, gain over the step before, share of the ceiling, ratio
    to the best peer with p20–p80.

    Args:
        measurements: of one operator's teaching versions, one direction and machine; the newest of each point counts.
    """
    newest = sorted(latest(measurements), key=lambda m: (point_key(m), implementation_key(m)))
    if not newest:
        return EMPTY
    body = []
    before: Measurement | None = None
    for m in newest:
        first = before is None or point_key(m) != point_key(before)
        gain = NONE if before is None or first else ratio(before.time_us / m.time_us)
        point = [f"`{m.workload}`", m.dtype] if first else ["", ""]
        time = figures(m.time_us) + ("†" if _wrong(m) else "")
        body.append([*point, m.implementation, time, gain, percent(m.share_of_ceiling), _ratio(m)])
        before = m
    head = ["workload", "dtype", "step", "µs", "to the step before", "share of ceiling", "ratio to best peer (p20–p80)"]
    return "\n".join([grid(head, body, numbers_from=3), "", provenance(newest)])


def headlines_table(measurements: Iterable[Measurement], points: Iterable[str]) -> str:
    """One row for each chosen point: our fastest implementation there, beside PyTorch and the best peer of its run.

    Args:
        measurements: of one machine; the newest of each point counts.
        points: ``operator:dtype:workload``, with ``:backward`` for the gradient.

    Raises:
        UnknownName: a point that has no measurement of ours.
    """
    timed = [m for m in latest(measurements) if m.metric == "time" and m.cache == "cold" and not is_rung(m)]
    found: dict[str, dict[str, Measurement]] = {}
    for m in timed:
        found.setdefault(_name(m), {})[m.implementation] = m
    right = {name: [m for m in of.values() if m.ours and not _wrong(m)] for name, of in found.items()}
    body, shown = [], []
    for point in points:
        if not right.get(point):
            raise UnknownName("measured point", point, (name for name, ours in right.items() if ours))
        m = min(right[point], key=lambda m: m.time_us)
        peers = [found[point].get(name) for name in ("torch", "torch.compile")]
        times = [figures(p.time_us) if p and p.run == m.run else NONE for p in peers]
        share, best = percent(m.share_of_ceiling), f"{_ratio(m)} {m.best_peer}" if m.best_peer else NONE
        operator = m.operator + (" backward" if m.direction == "backward" else "")
        body.append([operator, f"`{m.workload}`", m.dtype, m.implementation, figures(m.time_us), share, *times, best])
        shown.append(m)
    head = ["operator", "shape", "dtype", "kernel", "µs", "share of ceiling", "PyTorch, µs", "torch.compile, µs"]
    lines = [grid([*head, "ratio to best peer (p20–p80)"], body, numbers_from=4), "", provenance(shown)]
    return "\n".join(lines) if body else EMPTY


def _name(m: Measurement) -> str:
    return f"{m.operator}:{m.dtype}:{m.workload}" + (":backward" if m.direction == "backward" else "")


def ceilings_table(measurements: Iterable[Measurement]) -> str:
    """What the machine gives, as measured on it: one row for each ceiling, bandwidths first."""
    newest = latest(measurements)
    if not newest:
        return EMPTY
    newest.sort(key=lambda m: m.details.get("unit") != "B/s")  # stable: within a unit the order of measurement
    body = [[cell(m.implementation), m.metric, si(m.details.get("value"), m.details.get("unit", ""))] for m in newest]
    return "\n".join([grid(["ceiling", "of", "measured"], body, numbers_from=2), "", provenance(newest)])


def host_table(measurements: Iterable[Measurement]) -> str:
    """What a call on a small input costs on the host in µs: one row for each operator, one column for each way to call
    it.

    Args:
        measurements: of one machine, with the metric ``host time``.
    """
    newest = sorted(latest(measurements), key=lambda m: (m.operator, m.implementation))
    if not newest:
        return EMPTY
    ways = sorted(
        {m.implementation for m in newest}, key=lambda way: ("gradient" in way, not way.startswith("weft"), way)
    )
    rows: dict[str, dict[str, Measurement]] = {}
    for m in newest:
        rows.setdefault(m.operator, {})[m.implementation] = m
    body = []
    for operator, cells in rows.items():
        times = [figures(cells[way].time_us) if way in cells else NONE for way in ways]
        bare = next(
            (m.details.get("ratio_to_bare_launch") for m in cells.values() if m.implementation == "weft.ops"), None
        )
        body.append([operator, *times, ratio(bare) if bare else NONE])
    head = ["operator", *(f"{way} (µs)" for way in ways), "weft.ops to the bare launch"]
    return "\n".join([grid(head, body, numbers_from=1), "", provenance(newest)])


def provenance(measurements: Sequence[Measurement]) -> str:
    """GPU, driver, versions, commit and date of a table's rows; several where they differ."""
    drivers = distinct(str(m.machine.get("driver") or "") for m in measurements)
    packages = distinct(name for m in measurements for name in m.versions)
    versions = [f"{name} {'/'.join(distinct(m.versions.get(name, '') for m in measurements))}" for name in packages]
    dates = sorted({m.time[:10] for m in measurements if m.time})
    commits = distinct(m.commit for m in measurements)
    caches = distinct(m.cache for m in measurements if not is_ceiling(m))
    parts = [
        " / ".join(distinct(m.gpu for m in measurements)),
        f"driver {' / '.join(drivers)}" if drivers else "",
        ", ".join(versions),
        f"commit {' / '.join(commits)}" if commits else "",
        f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else "".join(dates),
        f"{' and '.join(caches)} cache, medians" if caches else "",
    ]
    return f"<sub>{cell(' · '.join(part for part in parts if part))}</sub>"


def _wrong(m: Measurement) -> bool:
    return "wrong" in m.details


def _ratio(m: Measurement) -> str:
    if m.ratio_to_best_peer is None:
        return NONE
    around = spread(m.ratio_p20, m.ratio_p80, lambda value: f"{value:.2f}")
    return ratio(m.ratio_to_best_peer) + (f" ({around})" if around else "")
