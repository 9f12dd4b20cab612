"""Measured tables inside Markdown files, written from the records between two markers.

    <!-- weft:table operator=softmax direction=forward gpu=nvidia-h200 -->
    <!-- weft:end -->

    <!-- weft:ceilings gpu=nvidia-h200 -->
    <!-- weft:end -->

    <!-- weft:host gpu=nvidia-h200 -->
    <!-- weft:end -->

    <!-- weft:summary gpu=nvidia-h200 -->
    <!-- weft:end -->

    <!-- weft:simulator cpu=amd-epyc-2-cores of=speed -->
    <!-- weft:end -->

What stands between the markers is replaced; everything else, and a marker inside a code fence, stays as it is. A table
may be narrowed with ``dtype=bf16``, ``cache=warm`` and ``device=cpu``; ``rungs=only`` shows the ladder's teaching
versions, which a table otherwise leaves out; of the simulator there is ``of=speed`` and ``of=growth``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from weft import registry
from weft.definition import BYTES, UnknownName
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
from weft.records import Measurement, Store, latest
from weft.report import simulator
from weft.report.markdown import cell, grid
from weft.report.summary import summary_table

KEYS = {
    "table": {"operator", "direction", "gpu", "dtype", "cache", "device", "rungs"},
    "ceilings": {"gpu"},
    "host": {"gpu"},
    "summary": {"gpu"},
    "simulator": {"cpu", "of"},
}
VALUES = {
    "direction": {"forward", "backward"},
    "cache": {"cold", "warm"},
    "dtype": set(BYTES),
    "device": {"cuda", "cpu"},
    "rungs": {"only"},
    "of": {"speed", "growth"},
}
_START = re.compile(r"\s*<!--\s*weft:(?P<kind>\w+)(?P<words>(\s+[\w-]+=[^\s>]+)*)\s*-->\s*$")
_END = "<!-- weft:end -->"


def refresh(path: Path, store: Store) -> str:
    """The file's text with every table between markers made anew from the store.

    Args:
        path: a Markdown file; it is read, not written.
        store: where the records are.

    Raises:
        ValueError: a marker that is unknown, lacks a word, asks for what there is not (a GPU without records, say) or is
            never closed; the message has file and line.
    """
    out: list[str] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    fence = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        out.append(line)
        at += 1
        if mark := re.match(r"\s*(```+|~~~+)", line):
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence):
                fence = ""
        elif not fence and _opens(line):
            start = at
            while at < len(lines) and _END not in lines[at]:
                if _opens(lines[at]):
                    raise ValueError(f"{path}:{at + 1}: a table opens before the one of line {start} has its {_END}")
                at += 1
            if at == len(lines):
                raise ValueError(f"{path}:{start}: table without an end; write {_END} after it")
            table = _table(line, store, f"{path}:{start}")
            out.append(f"\n{table}\n\n")
    if fence:
        raise ValueError(f"{path}: a code fence ({fence}) is never closed, so no table after it would be made anew")
    return "".join(out)


def _opens(line: str) -> bool:
    return bool(re.match(r"\s*<!--\s*weft:(?!end\b)", line))


def _table(line: str, store: Store, where: str) -> str:
    """The table that a marker asks for."""
    found = _START.match(line)
    if not found:
        raise ValueError(f"{where}: marker '{line.strip()}' should read <!-- weft:table operator=NAME gpu=NAME -->")
    kind, words = found["kind"], dict(word.split("=", 1) for word in found["words"].split())
    try:
        if kind not in KEYS:
            raise UnknownName("table", kind, KEYS)
        for word in words:
            if word not in KEYS[kind]:
                raise UnknownName(f"word of 'weft:{kind}'", word, KEYS[kind])
        if missing := [word for word in ("gpu", "operator", "cpu", "of") if word in KEYS[kind] and word not in words]:
            raise ValueError(f"'weft:{kind}' lacks {' and '.join(f'{word}=…' for word in missing)}")
        for word, value in words.items():
            known = {"gpu": store.machines(), "cpu": store.machines(), "operator": registry.names(), **VALUES}.get(word)
            if known is not None and value not in known:
                raise UnknownName(f"{word} of 'weft:{kind}'", value, known)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None

    if kind == "ceilings":
        return ceilings_table([m for m in store.read(words["gpu"], "ceiling") if is_ceiling(m)])
    if kind == "host":
        return host_table([m for m in store.read(words["gpu"]) if m.metric == "host time"])
    if kind == "summary":
        return summary_table(store.read(words["gpu"]), registry.names())
    if kind == "simulator":
        timed = simulator.read(store.lines(words["cpu"], simulator.FILE))
        return (simulator.speed_table if words["of"] == "speed" else simulator.growth_table)(timed)
    wanted = {"direction": "forward", "cache": "cold"} | {
        k: words[k] for k in ("direction", "cache", "dtype", "device") if k in words
    }
    rungs = words.get("rungs") == "only"
    chosen = [
        m
        for m in store.read(words["gpu"], words["operator"])
        if m.metric == "time" and is_rung(m) == rungs
        if all(getattr(m, key) == value for key, value in wanted.items())
    ]
    return (rungs_table if rungs else markdown_table)(chosen)


def markdown_table(measurements: Iterable[Measurement]) -> str:
    """A row for each point (workload, dtype), a column for each implementation's median time in µs, for each of ours
    its share of the measured ceiling and its ratio to the best peer with p20–p80; then where the numbers come from. Marked are
    results that were wrong, and times of another run than the newest of ours: ratios are within a run.

    Args:
        measurements: of one operator, direction and machine; of points measured twice the newest counts.
    """
    newest = sorted(latest(measurements), key=point_key)
    if not newest:
        return "*No measurements yet.*"
    columns = sorted({m.implementation: m for m in newest}.values(), key=implementation_key)
    ours = [m.implementation for m in columns if m.ours]
    devices = distinct(m.device for m in newest)

    def point(m: Measurement) -> tuple[str, ...]:
        return (m.workload, m.dtype, m.device)

    rows: dict[tuple[str, ...], dict[str, Measurement]] = {}
    for m in newest:
        rows.setdefault(point(m), {})[m.implementation] = m

    head = [
        "workload",
        "dtype",
        *(["device"] if len(devices) > 1 else []),
        *(f"{m.implementation} (µs)" for m in columns),
    ]
    for name in ours:
        head += [f"{name}: share of ceiling", f"{name}: ratio to best peer (p20–p80)"]
    body, alone = [], False
    for (workload, dtype, device), cells in rows.items():
        run = max((m for m in cells.values() if m.ours), key=lambda m: m.time, default=next(iter(cells.values()))).run
        fastest = min((m.time_us for m in cells.values() if not _wrong(m)), default=None)
        row = [f"`{workload}`", dtype, *([device] if len(devices) > 1 else [])]
        for column in columns:
            taken = cells[column.implementation].time_us if column.implementation in cells else None
            best = taken is not None and taken == fastest and len(cells) > 1
            text = f"**{figures(taken)}**" if best else figures(taken)
            if column.implementation in cells:
                text += "†" if _wrong(cells[column.implementation]) else ""
                if cells[column.implementation].run != run:
                    text, alone = text + "‡", True
            row.append(text)
        for name in ours:
            row += [percent(cells[name].share_of_ceiling), _ratio(cells[name])] if name in cells else [NONE, NONE]
        body.append(row)
    lines = [grid(head, body, numbers_from=len(head) - len(columns) - 2 * len(ours)), "", provenance(newest)]
    if wrong := [m for m in newest if _wrong(m)]:
        worst = max(m.error or 0.0 for m in wrong)  # of what must be exact there is no such number
        times = f", up to {worst:.2f} times" if worst else ""
        lines += ["", f"† errs by more than is allowed on this data{times} (`weft verify` judges ours)"]
    if alone:
        lines += ["", "‡ timed in an earlier run than the others of its row: no ratio of theirs is to it"]
    return "\n".join(lines)


def rungs_table(measurements: Iterable[Measurement]) -> str:
    """A row for each point and rung of a ladder: median time, how much faster than the rung before, share of the ceiling
    and ratio to the best peer with p20–p80.

    Args:
        measurements: of one operator's teaching versions, one direction and machine; the newest of each counts.
    """
    newest = sorted(latest(measurements), key=lambda m: (point_key(m), implementation_key(m)))
    if not newest:
        return "*No measurements yet.*"
    body = []
    before: Measurement | None = None
    for m in newest:
        first = before is None or point_key(m) != point_key(before)
        gain = NONE if before is None or first else ratio(before.time_us / m.time_us)
        point = [f"`{m.workload}`", m.dtype] if first else ["", ""]
        time = figures(m.time_us) + ("†" if _wrong(m) else "")
        body.append([*point, m.implementation, time, gain, percent(m.share_of_ceiling), _ratio(m)])
        before = m
    head = ["workload", "dtype", "rung", "µs", "to the rung before", "share of ceiling", "ratio to best peer (p20–p80)"]
    return "\n".join([grid(head, body, numbers_from=3), "", provenance(newest)])


def ceilings_table(measurements: Iterable[Measurement]) -> str:
    """What the machine gives, as measured on it: one row for each ceiling, bandwidths first."""
    newest = latest(measurements)
    if not newest:
        return "*No ceilings measured yet.*"
    newest.sort(key=lambda m: m.details.get("unit") != "B/s")  # stable: within a unit the order they were measured in
    body = [[cell(m.implementation), m.metric, si(m.details.get("value"), m.details.get("unit", ""))] for m in newest]
    return "\n".join([grid(["ceiling", "of", "measured"], body, numbers_from=2), "", provenance(newest)])


def host_table(measurements: Iterable[Measurement]) -> str:
    """What a call on a small input costs on the host in µs: a row for each operator, a column for each way to call it.

    Args:
        measurements: of one machine, with the metric ``host time``.
    """
    newest = sorted(latest(measurements), key=lambda m: (m.operator, m.implementation))
    if not newest:
        return "*No measurements yet.*"
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
    """Machine, driver, versions, commit and date of what stands above; several where they differ."""
    drivers = distinct(str(m.machine.get("driver") or "") for m in measurements)
    versions = distinct(", ".join(f"{name} {number}" for name, number in m.versions.items()) for m in measurements)
    dates = sorted({m.time[:10] for m in measurements if m.time})
    caches = distinct(m.cache for m in measurements if not is_ceiling(m))
    parts = [
        " / ".join(distinct(m.gpu for m in measurements)),
        f"driver {' / '.join(drivers)}" if drivers else "",
        " / ".join(versions),
        f"commit {' / '.join(distinct(m.commit for m in measurements))}" if any(m.commit for m in measurements) else "",
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
