"""What users and owners ask of a schedule: how long jobs took and waited, how full the cluster was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.cluster.model import WHOLE

if TYPE_CHECKING:
    from weft.cluster.simulate import Result

LEAST_S = (
    10.0  # a shorter job counts as so long in slowdowns, so that moments do not rule them (bounded slowdown, Feitelson)
)


def distribution(values: NDArray[np.float64]) -> dict[str, float | None]:
    """``mean``, ``p50``, ``p95`` and ``p99``; None of nothing."""
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def summary(result: Result) -> dict[str, Any]:
    """The object of ``weft simulate --json``: seconds throughout; jobs that never started count in no distribution."""
    from weft.cluster.simulate import REASONS

    jobs, ran = result.jobs, ~np.isnan(result.start)
    submit, duration = jobs.submit[ran], jobs.duration[ran]
    jct, queueing = result.end[ran] - submit, result.start[ran] - submit
    first = float(jobs.submit.min()) if len(jobs) else 0.0
    makespan = float(result.end[ran].max()) - first if ran.any() else 0.0
    busy = float((jobs.gpus[ran] * jobs.milli[ran] / WHOLE * duration).sum())
    gpus = result.cluster.total_gpus
    return {
        "order": result.order,
        "placement": result.placement,
        "ties": result.ties,
        "seed": result.seed,
        "jobs": len(jobs),
        "completed": int(ran.sum()),
        "generated": jobs.generated,
        "dropped": jobs.dropped,
        "nodes": len(result.cluster),
        "gpus": gpus,
        "jct": distribution(jct),
        "queueing": distribution(queueing),
        "slowdown": distribution(jct / np.maximum(duration, LEAST_S)),
        "makespan": makespan,
        "last_completion": float(result.end[ran].max()) if ran.any() else None,
        "utilisation": busy / (gpus * makespan) if makespan and gpus else None,
        "preemptions": 0,
        "wait_reasons": {name: float(column.sum()) for name, column in zip(REASONS, result.waited.T, strict=True)},
        "unschedulable": [{"job": jobs.id[j], "reason": why} for j, why in result.unschedulable.items()],
        "complete": result.complete,
        "cpu_s": result.cpu_s,
        "peak_memory_mib": peak_memory_mib(),
    }


def peak_memory_mib() -> float | None:
    """The largest resident size that this process has had."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def show(out: Any, found: dict[str, Any]) -> None:
    """Prints a summary on a ``rich`` console."""
    from rich.table import Table

    title = f"{found['order']}, {found['placement']} (ties: {found['ties']})"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("seconds", "mean", "p50", "p95", "p99"):
        table.add_column(column, justify="left" if column == "seconds" else "right")
    for name in ("jct", "queueing", "slowdown"):
        label = {"jct": "job completion time", "queueing": "queueing delay", "slowdown": "slowdown (times)"}[name]
        table.add_row(label, *(_number(found[name][k]) for k in ("mean", "p50", "p95", "p99")))
    out.print(table)
    share = "–" if found["utilisation"] is None else f"{found['utilisation']:.1%}"
    waited = sum(found["wait_reasons"].values())
    if waited:
        shares = sorted(((s / waited, name) for name, s in found["wait_reasons"].items() if s), reverse=True)
        out.print("waited for: " + ", ".join(f"{name} {share:.1%}" for share, name in shares), markup=False)
    out.print(
        f"{found['completed']:,} of {found['jobs']:,} jobs ran on {found['nodes']:,} nodes, {found['gpus']:,} GPUs; "
        f"makespan {found['makespan']:,.0f} s; utilisation {share}; {found['cpu_s']:.3g} CPU s",
        markup=False,
    )
    for why, count in found["dropped"].items():
        out.print(f"{count:,} rows of the trace were left out: {why}", markup=False)
    never = found["unschedulable"]
    for entry in never[:3]:
        out.print(f"job {entry['job']} can never run: {entry['reason']}", markup=False)
    if len(never) > 3:
        out.print(f"… and {len(never) - 3:,} more", markup=False)
    if not found["complete"]:
        out.print("interrupted: these are the jobs that had started by then", markup=False)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
