"""The page: one result, or several side by side, as one HTML file that needs nothing else."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.cluster.pictures import time_axis
from weft.cluster.result import Result
from weft.drawing.quantities import NONE, percent
from weft.words import count

HERE = Path(__file__).parent
DRAWN_AT_MOST = 8  # policies of a comparison with charts of their own
WARM_UP = "warm-up of {}: its {} count in no completion time, wait or slowdown, and the charts over time show them"
MOST_LISTED = 5  # jobs that can never run, by name


def page(results: Sequence[Result], title: str = "", trace: str = "") -> str:
    """HTML with charts of each policy, and with several results a comparison first.

    Args:
        results: of :func:`weft.cluster.simulate`; those that share order and placement count as runs of one policy, and the
            first of them is drawn.
        title: the page's heading; by default the policy's name, or how many there are.
        trace: the trace's name.

    Raises:
        ValueError: no result.
    """
    from weft.cluster.pictures import compare, gantt
    from weft.drawing import palette
    from weft.drawing.embedding import embed_all, template

    check(results)
    policies = compare.policies(results)
    drawn = policies[:DRAWN_AT_MOST]
    text = template(HERE).render(
        title=title or (policies[0].name if len(policies) == 1 else f"{len(policies)} scheduling policies"),
        about=_about(results[0], trace),
        tiles=_tiles(results[0]) if len(results) == 1 else _best(policies),
        comparison=embed_all(*compare.charts(policies)) if len(results) > 1 else [],
        table=[_row(policy) for policy in policies] if len(results) > 1 else [],
        runs=len(results),
        sections=[_section(policy.name, policy.runs, gantt.MOST_EMBEDDED // len(drawn)) for policy in drawn],
        left_out=[policy.name for policy in policies[DRAWN_AT_MOST:]],
        generated=any(result.jobs.generated for result in results),
        to_dark=palette.TO_DARK | dict(gantt.ramp()),
    )
    return str(text)


def _about(result: Result, trace: str) -> list[str]:
    """Which trace and cluster, and when; and what is assumed of them."""
    from weft.cluster.check import NO_ESTIMATES, assumptions

    jobs, cluster = result.jobs, result.cluster
    over = time_axis.text(float(np.ptp(jobs.submit))) if len(jobs) else NONE
    return [
        f"{trace or 'trace'}: {count(len(jobs), 'job')}, submitted over {over}",
        f"cluster: {count(len(cluster), 'node')}, {count(cluster.total_gpus, 'GPU')}",
        f"simulated on {datetime.date.today().isoformat()}",
        *(f"left out: {count(rows, 'row')}, {why}" for why, rows in jobs.dropped.items()),
        *(
            [WARM_UP.format(time_axis.text(result.warm_up_s), count(int(result.warm_up.sum()), "job"))]
            if result.warm_up_s
            else []
        ),
        *(text for text in assumptions(jobs) if text == NO_ESTIMATES),
    ]


def check(results: Sequence[Result]) -> None:
    if not len(results):
        raise ValueError("pictures of no result; expected a list with at least one result of weft.cluster.simulate")


def _section(name: str, runs: Sequence[Result], most: int) -> dict[str, Any]:
    """All charts of a policy's first run."""
    from weft.cluster import allocations
    from weft.cluster.pictures import curves, distributions, gantt, reasons, series
    from weft.drawing.embedding import embed, embed_all

    result = runs[0]
    held = allocations.of(result)
    found = series.over_time(result, held)
    bars = gantt.gantt(result, held, most)
    jobs = result.jobs
    return {
        "name": name,
        "ties": result.ties,
        "seed": result.seed,
        "runs": len(runs),
        "facts": _facts(result),
        "gantt": bars and vars(bars) | {"bars": embed(bars.bars), "map": embed(bars.map)},
        "mapped_above": gantt.MAPPED_ABOVE,
        "over_time": embed_all(
            curves.utilisation(result, found),
            curves.fragmentation(result, found),
            curves.queue(found),
            curves.waiting_gpus(result, found),
        )
        if len(jobs)
        else [],
        "counted": allocations.without_nodes(result),
        "spread": embed_all(*distributions.by_size(result)),
        "reasons": embed_all(*reasons.charts(result)),
        "ran": int(result.ran.sum()),
        "never": [(jobs.id[j], why) for j, why in list(result.unschedulable.items())[:MOST_LISTED]],
        "never_count": len(result.unschedulable),
        "complete": result.complete,
        "binned": any(each.mean is not each.most for each in vars(found).values()),
        "cut": time_axis.cut_after(result) if result.complete else 0,
        "last": time_axis.text(float(np.nanmax(result.end)) - time_axis.span(result)[0]) if held else "",
    }


def _facts(result: Result) -> list[tuple[str, str]]:
    from weft.cluster.metrics import summary

    found = summary(result)
    facts = [
        ("jobs", f"{found['jobs']:,}, of which {found['completed']:,} ran" + ", generated" * found["generated"]),
        ("cluster", f"{count(found['nodes'], 'node')}, {count(found['gpus'], 'GPU')}"),
        ("policy", f"order {result.order}, placement {result.placement}, ties {result.ties}, seed {result.seed}"),
        ("makespan", time_axis.text(found["makespan"])),
        ("utilisation", percent(found["utilisation"])),
    ]
    for key, name in (("jct", "job completion time"), ("queueing", "wait")):
        facts.append((name, ", ".join(f"{k} {time_axis.text(v)}" for k, v in found[key].items())))
    return facts


def _tiles(result: Result) -> list[dict[str, str]]:
    from weft.cluster import allocations
    from weft.cluster.metrics import summary
    from weft.cluster.pictures import series

    found = summary(result)
    begin, last = (
        time_axis.span(result)[0] + result.warm_up_s,
        float(np.nanmax(result.stretches.begin, initial=-np.inf)),
    )
    name, busy, until = "Utilisation", found["utilisation"], "the last completion"
    if last > begin and found["gpus"]:  # a long tail of completions says little about a policy
        held = series.binned(series.allocated(allocations.of(result)), begin, last, points=1).overall
        name, until = "GPUs allocated", f"the last start; utilisation {percent(busy)} until the last completion"
        busy = held / found["gpus"]
    tone = "" if found["completed"] == found["jobs"] else "bad"
    return [
        _tile(
            "Job completion time",
            time_axis.text(found["jct"]["mean"]),
            f"mean; p99 {time_axis.text(found['jct']['p99'])}",
        ),
        _tile(
            "Wait", time_axis.text(found["queueing"]["mean"]), f"mean; p99 {time_axis.text(found['queueing']['p99'])}"
        ),
        _tile(name, percent(busy), f"of {count(found['gpus'], 'GPU')} until {until}"),
        _tile("Jobs", f"{found['completed']:,}", f"ran, of {found['jobs']:,}", tone),
    ]


def _best(policies: Sequence[Any]) -> list[dict[str, str]]:
    """The best policy by each metric; empty where no job ran."""
    tiles = []
    for quantity, statistic, name in (
        ("jct", "mean", "Least mean completion time"),
        ("jct", "p99", "Least p99 completion time"),
        ("wait", "mean", "Least mean wait"),
        ("wait", "p99", "Least p99 wait"),
    ):
        means = {p.name: _mean(p.statistics(quantity)[statistic]) for p in policies}
        known = {name: value for name, value in means.items() if value is not None}
        if known:
            best = min(known, key=lambda name: known[name])
            least = [name for name in known if known[name] == known[best]]
            tiles.append(
                _tile(name, time_axis.text(known[best]), best + (f" and {len(least) - 1} more" if least[1:] else ""))
            )
    return tiles


def _row(policy: Any) -> dict[str, Any]:
    """A policy's numbers, means of its runs: what it costs, then times."""
    from weft.cluster.metrics import summary

    every = [summary(result) for result in policy.runs]
    lost = [found["lost_gpu_s"] / max(found["lost_gpu_s"] + found["gpu_s"], 1e-9) for found in every]
    stops = _mean([found["preemptions"] for found in every]) or 0.0
    numbers: list[tuple[float | None, str]] = [(stops, f"{stops:,.0f}")]
    late = [found["fairness"]["finish_time"]["above_1"] for found in every]
    for column in ([found["utilisation"] for found in every], lost, late):
        mean = _mean([value for value in column if value is not None])
        numbers.append((mean, NONE if mean is None else percent(mean)))
    makespan = _mean([found["makespan"] for found in every])
    numbers.append((makespan, time_axis.text(makespan)))
    for quantity in ("jct", "wait"):
        for column in policy.statistics(quantity).values():
            mean = _mean(column)
            numbers.append((mean, NONE if mean is None else time_axis.text(mean)))
    return {"name": policy.name, "runs": len(policy.runs), "numbers": numbers}


def _mean(column: Sequence[float]) -> float | None:
    return sum(column) / len(column) if column else None


def _tile(name: str, number: str, text: str, tone: str = "") -> dict[str, str]:
    return {"name": name, "number": number, "text": text, "tone": tone}
