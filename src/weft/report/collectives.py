"""Tables of collectives from the records of ``weft comm --save``: the newest run of each back end, number of ranks and mode."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from weft.comm import verdict
from weft.drawing.quantities import NONE, distinct, figures
from weft.report.markdown import grid

FILE = "comm"  # of a machine's records


@dataclass
class Run:
    """One run: what it ran on, and its points."""

    id: str
    backend: str
    ranks: int
    about: dict[str, Any]
    commit: str
    points: list[dict[str, Any]] = field(default_factory=list)

    @property
    def how(self) -> str:
        """The mode, with what is not usual."""
        first = self.points[0]
        return first["mode"] + ", registered memory" * bool(first.get("registered"))

    @property
    def title(self) -> str:
        where = distinct(self.about.get("gpus") or [])
        on = (
            f"{self.ranks} x {where[0]}"
            if where
            else f"{self.ranks} CPU processes on {self.about.get('cores', '?')} cores"
        )
        return f"{self.backend} on {on}, {self.points[0]['dtype']}, mode {self.how}"

    @property
    def footnote(self) -> str:
        version = next((f"{k} {self.about[k]}" for k in ("nccl", "mpi") if k in self.about), "")
        parts = (version, f"torch {self.about.get('torch', '?')}", f"commit {self.commit}", self.id[:10])
        return " · ".join(p for p in parts if p)


def runs(lines: Iterable[dict[str, Any]]) -> list[Run]:
    """The newest run of each back end, number of ranks, dtype and mode; records without a run's first line are skipped."""
    found: dict[str, Run] = {}
    for line in lines:
        if "about" in line:
            found[line["run"]] = Run(line["run"], line["backend"], line["ranks"], line["about"], line.get("commit", ""))
        elif line.get("run") in found and "collective" in line:
            found[line["run"]].points.append(line)
    newest = {(r.backend, r.ranks, r.points[0]["dtype"], r.how): r for r in found.values() if r.points}
    return sorted(newest.values(), key=lambda r: (r.backend, r.ranks, r.how))


def verdicts(run: Run) -> list[str]:
    """A line for each collective with bytes: latency and bandwidth by the model, and the share of the link."""
    found = []
    for name in distinct(p["collective"] for p in run.points):
        mine = [p for p in run.points if p["collective"] == name]
        model = verdict.model(mine)
        texts = [verdict.model_line(model)] if model else []
        texts.append(verdict.judge(mine, run.about.get("peak", {})))
        if text := "; ".join(filter(None, texts)):
            found.append(f"{name}: {text}")
    return found


def rows(run: Run) -> tuple[list[str], list[list[str]]]:
    """The heading and the rows of a run's table: microseconds (median) and bus bandwidth by size and collective."""
    names = distinct(p["collective"] for p in run.points)
    by = {(p["collective"], p["bytes"]): p for p in run.points}
    sizes = sorted({p["bytes"] for p in run.points})
    body = []
    for size in sizes:
        cells = []
        for name in names:
            p = by.get((name, size))
            rate = f" ({figures(p['busbw'])})" if p and size else ""
            cells.append(f"{figures(p['p50_us'])}{rate}" if p else NONE)
        body.append([verdict.size_text(size) if size else "no data", *cells])
    return ["size", *names], body


def table(run: Run) -> str:
    """A run's table in Markdown."""
    head, body = rows(run)
    return f"{grid(head, body, 1)}\n\n<sub>{run.title}: µs, medians (bus bandwidth, GB/s) · {run.footnote}</sub>"
