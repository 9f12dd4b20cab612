"""Nsight Compute's output as CSV: ``ncu --csv`` (a line for each metric) or ``ncu --csv --page raw`` (a column for each).

A kernel is limited by memory or by compute where that reaches 60 % of its peak, else by latency: NVIDIA's rule of thumb for
its "speed of light" section. How to record and read it: docs/notes/learn/nsight.en.md.
"""

import csv
import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.profiling.attribution import short

BUSY = 0.6
SECONDS = {
    "ns": 1e-9,
    "nsecond": 1e-9,
    "us": 1e-6,
    "usecond": 1e-6,
    "ms": 1e-3,
    "msecond": 1e-3,
    "s": 1.0,
    "second": 1.0,
}
TIME = ("gpu__time_duration.sum", "Duration")
MEMORY = ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "DRAM Throughput")
COMPUTE = ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "Compute (SM) Throughput", "SM [%]")
RATE = ("dram__bytes.sum.per_second", "Memory Throughput")
SCALE = {"byte/second": 1.0, "byte/s": 1.0, "Kbyte/second": 1e3, "Kbyte/s": 1e3, "Mbyte/second": 1e6, "Mbyte/s": 1e6,
         "Gbyte/second": 1e9, "Gbyte/s": 1e9, "Tbyte/second": 1e12, "Tbyte/s": 1e12}  # fmt: skip


@dataclass
class Kernel:
    """All launches of a kernel; shares are of the units' peaks, weighted by time. None: not in the report."""

    name: str
    calls: int
    time_us: float
    share: float
    memory_share: float | None
    compute_share: float | None
    bytes_per_s: float | None
    limited_by: str  # memory, compute, latency; "" where not known


def read(path: str | os.PathLike[str]) -> list[Kernel]:
    """The kernels of a report, the longest first.

    Raises:
        ValueError: it is no such output, or no launch in it has a duration.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    lines = [line for line in text.splitlines() if line.startswith('"') and line.count('"') > 2]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if not rows or not {"ID", "Kernel Name"} <= set(rows[0]):
        raise ValueError(f"{path} has no columns 'ID' and 'Kernel Name'; expected the output of ncu --csv")
    launches = list(_long(rows) if "Metric Name" in rows[0] else _wide(rows))
    groups: dict[str, list[dict[str, float]]] = {}
    for name, metrics in launches:
        if metrics.get("time", 0.0) > 0:
            groups.setdefault(short(name), []).append(metrics)
    if not groups:
        raise ValueError(
            f"{path}: no launch has a duration ({TIME[0]}); record it with ncu --set basic, or --section SpeedOfLight"
        )
    total = sum(m["time"] for members in groups.values() for m in members)
    return sorted((_kernel(name, members, total) for name, members in groups.items()), key=lambda k: -k.time_us)


def _kernel(name: str, members: list[dict[str, float]], total: float) -> Kernel:
    time = sum(m["time"] for m in members)

    def mean(metric: str) -> float | None:
        known = [m for m in members if metric in m]
        return sum(m[metric] * m["time"] for m in known) / sum(m["time"] for m in known) if known else None

    memory, compute = mean("memory"), mean("compute")
    limit = ""
    if memory is not None and compute is not None:
        limit = "latency" if max(memory, compute) < BUSY else "memory" if memory >= compute else "compute"
    return Kernel(name, len(members), time * 1e6, time / total, memory, compute, mean("rate"), limit)


def _long(rows: list[dict[str, str]]) -> Iterator[tuple[str, dict[str, float]]]:
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows:
        launch = found.setdefault(row["ID"], (row["Kernel Name"], {}))
        _put(launch[1], row["Metric Name"] or "", row.get("Metric Unit") or "", row.get("Metric Value") or "")
    return iter(found.values())


def _wide(rows: list[dict[str, str]]) -> Iterator[tuple[str, dict[str, float]]]:
    """The first row has the units."""
    units = rows[0] if not rows[0]["ID"] else {}
    for row in rows[1:] if units else rows:
        metrics: dict[str, float] = {}
        for column, value in row.items():
            _put(metrics, column or "", units.get(column) or "", value or "")
        yield row["Kernel Name"], metrics


def _put(metrics: dict[str, float], name: str, unit: str, text: str) -> None:
    try:
        value = float(text.replace(",", ""))
    except (ValueError, AttributeError):
        return
    if not math.isfinite(value) or value < 0:
        return
    if name in TIME and unit in SECONDS:
        metrics["time"] = value * SECONDS[unit]
    elif name in MEMORY and unit == "%":
        metrics["memory"] = value / 100
    elif name in COMPUTE and unit == "%":
        metrics["compute"] = value / 100
    elif name in RATE and unit in SCALE:
        metrics["rate"] = value * SCALE[unit]
