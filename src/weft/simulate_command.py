"""``weft simulate`` and ``weft simulate compare``: what is checked before anything is simulated, and what is told after."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from weft.console import Json, note, out, print_json, told
from weft.simulate_options import (
    CheckpointEvery,
    ClusterFile,
    Columns,
    Format,
    FormatOptions,
    GpuMemory,
    Limit,
    Nodes,
    Pictures,
    Quotas,
    RestartCost,
    Trace,
    Weights,
    Where,
    check_picture,
    cluster_extra,
    cluster_of,
    jobs_of,
    options_of,
    tenants_of,
)


def simulate(
    path: Trace,
    format: Format = "",
    nodes: Nodes = "",
    gpu_memory: GpuMemory = 0.0,
    cluster: ClusterFile = None,
    order: Annotated[
        str,
        typer.Option(help="ORDERS; with -skip, -easy or -conservative others than the head may start", metavar="NAME"),
    ] = "fifo",
    placement: Annotated[str, typer.Option(help="PLACEMENTS", metavar="NAME")] = "best",
    ties: Annotated[str, typer.Option(help="lowest, highest or random; by default the placement's own")] = "",
    seed: Annotated[int, typer.Option(min=0, help="of random ties")] = 0,
    restart_cost: RestartCost = 0.0,
    checkpoint_every: CheckpointEvery = 0.0,
    weights: Weights = "",
    quota: Quotas = "",
    where: Where = "",
    limit: Limit = None,
    option: FormatOptions = None,
    columns: Columns = "",
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="keep every job and event (Parquet) and the summary there")
    ] = None,
    pictures: Pictures = None,
    as_json: Json = False,
) -> None:
    """Run the jobs of a trace through a cluster: how long they take and wait, how full it is, and why.

    `weft simulate compare PATH` runs several policies side by side.

    Exit status 1 when no job could run or a disk failed, 2 for a mistake, 130 after Ctrl-C.
    """
    with cluster_extra():
        from weft.cluster import metrics, terminal
        from weft.cluster import order as orders
        from weft.cluster import placement as placements
        from weft.cluster import save as saving
        from weft.cluster import simulate as run
        from weft.cluster import ties as tie_rules

    orders.find(order)
    tie_rules.check(ties or placements.find(placement).ties)
    made = cluster_of(nodes, gpu_memory, cluster)
    tenants = tenants_of(weights, quota)
    options = options_of(format, option or [], columns)
    if pictures:
        check_picture(pictures)
    if save:
        saving.check(save)
    with _bar(f"reading {path.name}", as_json) as step:
        jobs = jobs_of(path, format, options, where, limit)
        result = run(
            jobs, made, order, placement, ties=ties, seed=seed, restart_s=restart_cost, checkpoint_s=checkpoint_every,
            **tenants, on_progress=lambda *at: step("simulating", *at),
        )  # fmt: skip
    found = metrics.summary(result)
    if as_json:
        print_json(found)
    else:
        terminal.show(out, found)
    if save:
        saving.write(save, result, found)
        told(f"saved in {save}")
    if pictures:
        from weft.cluster import pictures as drawing

        told(f"drawn: {drawing.write(pictures, [result])}")
    raise typer.Exit(130 if not result.complete else 0 if found["completed"] else 1)


def compare(
    path: Trace,
    format: Format = "",
    nodes: Nodes = "",
    gpu_memory: GpuMemory = 0.0,
    cluster: ClusterFile = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORDER:PLACEMENT[:TIES]",
            help="may be repeated; by default every order that stops no jobs and asks nothing of tenants (priority only where "
            "priorities differ), with best, first, worst and consolidate. Orders: ORDERS, those that stop no jobs also with "
            "-skip, -easy, -conservative (those among "
            "tenants with -skip only); placements: PLACEMENTS",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="how many of whatever is random")] = 10,
    ties: Annotated[str, typer.Option(metavar="RULE,…", help="rules to try as well: lowest,highest,random")] = "",
    shuffle_same_second: Annotated[
        bool,
        typer.Option("--shuffle-same-second", help="try random orders of jobs that are submitted at the same time"),
    ] = False,
    restart_cost: RestartCost = 0.0,
    checkpoint_every: CheckpointEvery = 0.0,
    weights: Weights = "",
    quota: Quotas = "",
    metric: Annotated[str, typer.Option(metavar="NAME", help="to rank by: METRICS")] = "jct.mean",
    processes: Annotated[int | None, typer.Option(min=1, help="that run side by side; by default all cores")] = None,
    where: Where = "",
    limit: Limit = None,
    option: FormatOptions = None,
    columns: Columns = "",
    pictures: Pictures = None,
    as_json: Json = False,
) -> None:
    """Run several policies on one trace and rank them, with what seeds, ties and same-second jobs change.

    Exit status 1 when a run failed, no job could run or a disk failed, 2 for a mistake, 130 after Ctrl-C.
    """
    with cluster_extra():
        from weft.cluster import compare as run
        from weft.cluster import terminal
        from weft.cluster.compare import INTERRUPTED, METRICS, Policy, has_priorities, same_second
    from weft.definition import UnknownName

    policies = [Policy.parse(text) for text in policy or []]
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    made = cluster_of(nodes, gpu_memory, cluster)
    tenants = tenants_of(weights, quota)
    options = options_of(format, option or [], columns)
    if pictures:
        check_picture(pictures)
    with _bar(f"reading {path.name}", as_json) as step:
        jobs = jobs_of(path, format, options, where, limit)
        step("starting processes", 0, None)
        compared = run(
            jobs,
            made,
            policies,
            seeds=seeds,
            ties=[rule.strip() for rule in ties.split(",") if rule.strip()],
            shuffle_same_second=shuffle_same_second,
            restart_s=restart_cost,
            checkpoint_s=checkpoint_every,
            **tenants,
            metric=metric,
            processes=processes,
            keep=pictures is not None,
            on_progress=lambda *at: step("simulating", *at),
        )
    if not policies and not has_priorities(jobs):
        told("all jobs have the same priority: the order priority, which is fifo then, is left out")
    if shuffle_same_second and not same_second(jobs):
        told("no two jobs are submitted at the same time: there is nothing to shuffle")
    if as_json:
        print_json(terminal.as_json(compared, metric))
    else:
        terminal.show_compared(out, compared, metric)
    results = [r.result for each in compared for r in each.runs if r.result is not None]
    if pictures and results:
        from weft.cluster import pictures as drawing

        told(f"drawn: {drawing.write(pictures, results)}")
    failed = [why for each in compared for why in each.failed]
    none_ran = not any(run.found["completed"] for each in compared for run in each.runs)
    raise typer.Exit(130 if INTERRUPTED in failed else 1 if failed or none_ran else 0)


@contextlib.contextmanager
def _bar(begin: str, quiet: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on a terminal; nothing with ``--json`` or where standard error is none. Yields what to tell: what is done, how far
    it is, and of how much (None while nobody knows)."""
    columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=note, transient=True, disable=quiet or not note.is_terminal) as bar:
        task = bar.add_task(begin, total=None)

        def step(what: str, done: int, total: int | None) -> None:
            if bar.tasks[0].description != what:
                bar.reset(task, description=what, total=total)
            bar.update(task, completed=done, total=total)

        yield step
